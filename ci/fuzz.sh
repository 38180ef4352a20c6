#!/usr/bin/env bash
# Runs fuzz targets, each from the inputs in fuzz/seeds and from what earlier runs found in fuzz/corpus.
#
# usage: ci/fuzz.sh SECONDS [TARGET]...      (default: all of fuzz/targets)
#
# Each runs in as many processes as there are processors. Needs nightly Rust, cargo-fuzz (it is installed into target/tools where it is not in
# the PATH) and a C++ compiler. A finding is printed and left in fuzz/artifacts; `cargo +nightly fuzz run TARGET FILE` repeats it.
set -euo pipefail
cd "$(dirname "$0")/.."

[[ ${1:-} =~ ^[0-9]+$ ]] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2 && exit 2; }
seconds=$1
shift
if [[ $# -eq 0 ]]; then
    for file in fuzz/targets/*.rs; do
        set -- "$@" "$(basename "$file" .rs)"
    done
fi
export PATH=$PATH:$PWD/target/tools/cargo/bin
command -v cargo-fuzz >/dev/null || cargo install cargo-fuzz --version 0.13.2 --locked --quiet --root target/tools/cargo
cargo +nightly --version >/dev/null || { echo "fuzz: no nightly Rust: rustup toolchain install nightly --profile minimal" >&2 && exit 1; }

# A process that is killed leaves its folder of files.
if [[ -d /dev/shm ]]; then
    MOH_FUZZ_HOME=$(mktemp -d /dev/shm/moh-fuzz.XXXXXX)
    export MOH_FUZZ_HOME
    trap 'rm -rf "$MOH_FUZZ_HOME"' EXIT
fi

cargo +nightly fuzz build
failed=()
for target in "$@"; do
    printf '\n== %s\n' "$target"
    mkdir -p "fuzz/corpus/$target" "fuzz/artifacts/$target"
    options=(-max_total_time="$seconds" -timeout=20 -rss_limit_mb=4096 -print_final_stats=1 -fork="$(nproc)" -ignore_crashes=0)
    # What tract takes time and memory for is not ours to bound (SECURITY.md). With -fork, both are ignored where nothing is said.
    ignored=0
    [[ $target != model ]] || ignored=1
    options+=(-ignore_timeouts=$ignored -ignore_ooms=$ignored)
    cargo +nightly fuzz run "$target" "fuzz/corpus/$target" "fuzz/seeds/$target" -- "${options[@]}" || failed+=("$target")
done
[[ ${#failed[@]} -eq 0 ]] || { echo "fuzz: findings of ${failed[*]}; see fuzz/artifacts" >&2 && exit 1; }
