#!/usr/bin/env bash
# The library's own tests, and those of its kernels, under valgrind, ThreadSanitizer and Miri.
#
# usage: ci/attack/sanitizers.sh [valgrind] [tsan] [miri]      (default: all)
#
# valgrind needs a build of the tests (cargo test --release --workspace --no-run). The others need nightly Rust with rust-src and miri.
set -euo pipefail
cd "$(dirname "$0")/../.."

[[ $# -gt 0 ]] || set -- valgrind tsan miri
for tool in "$@"; do
    printf '== %s\n' "$tool"
    case $tool in
    valgrind)
        # It knows no AVX-512, and says so to the program, which takes the AVX2 kernels then; AMX is emulated.
        cargo test --release --locked --workspace --exclude moh-cuda --no-run --message-format json 2>/dev/null |
            python3 -c 'import json, os, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("executable") and message["profile"]["test"]:
        print(os.path.dirname(message["manifest_path"]), message["target"]["name"], message["executable"], sep="\t")' >target/tests.txt
        check() { # FOLDER NAME [ARGUMENT..]: the test program of that name
            local folder=$PWD/$1 test
            test=$(awk -F '\t' -v folder="$folder" -v name="$2" '$1 == folder && $2 == name { print $3 }' target/tests.txt)
            (cd "$folder" && valgrind --quiet --error-exitcode=9 --errors-for-leak-kinds=definite --leak-check=full "$test" "${@:3}")
        }
        check custom-ops/ort moh_ops --test-threads=2
        check custom-ops/cpu moh_cpu --test-threads=2
        # Each of the others takes minutes, or hours.
        check custom-ops/cpu it --test-threads=2 aggregated_attention:: cache:: errors:: every_operator:: head_linear:: layers:: packed:: \
            nbits::all nbits::blocks nbits::empty nbits::heads routed_attention::all routed_attention::empty routed_attention::nan
        ;;
    tsan)
        # The standard library is instrumented, too; otherwise its locks are not seen.
        RUSTFLAGS=-Zsanitizer=thread cargo +nightly test --release --locked -Zbuild-std --target x86_64-unknown-linux-gnu \
            --target-dir target/tsan -p moh-ops --lib
        ;;
    miri)
        # Otherwise it rounds each exp differently, to find who relies on it.
        export MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-deterministic-floats"
        cargo +nightly miri test --locked --target-dir target/miri -p moh-operators --lib --test it
        ;;
    *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
    esac
done
