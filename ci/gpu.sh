#!/usr/bin/env bash
# Everything that needs a GPU: correctness of the CUDA kernels, their speed against dense peers, whole models in onnxruntime.
#
# usage: ci/gpu.sh --pack [--onnxruntime]   on a machine with Rust: builds what the GPU machine runs, into target/gpu
#        ci/gpu.sh --keep                   on the GPU machine: puts the pieces of target/gpu aside, in MOH_GPU_HOME
#        ci/gpu.sh [PART ...]               on the GPU machine, which needs no network: tests, memory, kernels, models
#
# target/gpu/moh-gpu.tar.xz holds programs with the kernels inside; with --onnxruntime, onnxruntime's CUDA provider for Hopper comes
# as ort.00, ort.01, ... of at most 24 MiB each. Where a transfer is limited, carry some, run --keep, carry the others. The GPU
# machine needs a driver for CUDA 13 and, for speed and models, a Python with PyTorch for CUDA 13; for models, onnx as well.
# Results go to MOH_GPU_OUT: tables.md, *.json, and a log a part. Where there is no GPU it says so and succeeds.
#
# MOH_GPU_HOME       pieces and unpacked programs    (/tmp/moh-gpu)
# MOH_GPU_OUT        results                         (target/gpu-results)
# MOH_REQUIRE_CUDA   1: no GPU is a failure
# MOH_GPU_QUICK      1: fewer shapes
# MOH_GPU_SECONDS    the longest that a part may take    (420)
# MOH_CUDA_DRIVER    the emulator instead of a GPU, to try part `tests`
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
pieces=$root/target/gpu
built=${CARGO_TARGET_DIR:-target}/release
home=${MOH_GPU_HOME:-/tmp/moh-gpu}
out=${MOH_GPU_OUT:-$root/target/gpu-results}
limit=${MOH_GPU_SECONDS:-420}

usage() { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | sed '$d'; }
step() { printf '\n== %s\n' "$*"; }

# pack NAME FILE: adds a program or library without its symbols.
pack() {
    cp "$2" "$stage/$1"
    strip --strip-unneeded "$stage/$1"
}

pack_all() {
    ci/cuda-toolchain.sh >/dev/null
    mkdir -p "$pieces"
    stage=$(mktemp -d)
    trap 'rm -rf "$stage"' EXIT
    # The workspace as ci/test.sh builds it, so that nothing is compiled twice; then what has kernels.
    cargo build --release --locked --workspace
    cargo build --release --locked -p moh-ops --features cuda
    cargo build --release --locked -p moh-cuda --features kernels --example moh_cuda
    pack moh-export "$built/moh-export"
    pack libmoh_ops.so "$built/libmoh_ops.so"
    pack libmoh_cuda.so "$built/examples/libmoh_cuda.so"
    # Cargo names test programs by a hash: it says which it has built.
    program=$(cargo test --release --locked -p moh-cuda --features kernels --test it --no-run --message-format=json |
        python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("executable") and message["target"]["name"] == "it":
        print(message["executable"])')
    pack test-cuda "$program"
    cp models/src/presets/moh-*.json "$stage/"
    tar -C "$stage" -cJf "$pieces/moh-gpu.tar.xz" .
    if [ "${1:-}" = --onnxruntime ]; then pack_onnxruntime; fi
    ls -l "$pieces"
}

# onnxruntime's CUDA provider, cut down to the code for Hopper, and its Python package.
pack_onnxruntime() {
    rm -rf "${stage:?}"/*
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --implementation cp --python-version 3.12 --abi cp312 \
        --dest "$stage" onnxruntime-gpu==1.31.1
    python3 -m zipfile -e "$stage"/onnxruntime_gpu-*.whl "$stage/wheel"
    capi=$stage/wheel/onnxruntime/capi
    python3 ci/gpu/keep_arch.py "$capi/libonnxruntime_providers_cuda.so" 90
    rm -f "$capi"/libonnxruntime_providers_tensorrt.so
    rm -f "$pieces"/ort.[0-9]*
    # The Python module holds the runtime; libonnxruntime.so of C and Rust programs is left out.
    tar -C "$stage/wheel" --exclude 'libonnxruntime.so*' -cf - onnxruntime | xz -6 -T2 | split -b 24M -d - "$pieces/ort."
}

keep() {
    mkdir -p "$home"
    find "$pieces" -maxdepth 1 \( -name 'ort.*' -o -name '*.tar.xz' \) -exec cp {} "$home/" \;
    ls -l "$home"
}

# The folders of CUDA's libraries in Python's packages, which onnxruntime looks for among the system's.
cuda_folders() {
    python3 - <<'PYTHON'
import glob, os, site, sys
roots = site.getsitepackages() + [p for p in sys.path if p.endswith("site-packages")]
found = {os.path.dirname(f) for r in roots for f in glob.glob(os.path.join(r, "nvidia", "**", "lib", "*.so*"), recursive=True)}
print(":".join(sorted(found)))
PYTHON
}

unpack() {
    mkdir -p "$home/bin" "$out"
    find "$pieces" -maxdepth 1 \( -name 'ort.*' -o -name '*.tar.xz' \) -exec cp {} "$home/" \; 2>/dev/null || true
    [ -f "$home/moh-gpu.tar.xz" ] || {
        echo "gpu: no $home/moh-gpu.tar.xz: run ci/gpu.sh --pack on a machine with Rust, and carry target/gpu here" >&2
        exit 1
    }
    tar -C "$home/bin" -xJf "$home/moh-gpu.tar.xz"
    if [ -f "$home/ort.00" ] && [ ! -d "$home/python/onnxruntime" ]; then
        mkdir -p "$home/python"
        cat "$home"/ort.* | tar -C "$home/python" -xJf -
    fi
}

failed=()
# part NAME COMMAND...: runs a part within its time, and goes on where it fails.
part() {
    name=$1
    shift
    step "$name: $*"
    code=0
    timeout "$limit" "$@" 2>&1 | tee "$out/$name.log" || code=$?
    [ "$code" = 0 ] || failed+=("$name (exit $code)")
}

# The modules of the tests, each of which has a part's time. `params` compares sources, which are not here.
topics() { "$home/bin/test-cuda" --list --format terse | sed -n 's/::.*//p' | sort -u | grep -vx params; }

run_tests() {
    for topic in $(topics); do
        for seed in 1 "$RANDOM$RANDOM"; do
            part "test-$topic-$seed" env MOH_SEED="$seed" MOH_REQUIRE_CUDA="$required" "$home/bin/test-cuda" "$topic::" --test-threads=1
        done
    done
}

run_memory() {
    command -v compute-sanitizer >/dev/null || {
        echo "gpu: no compute-sanitizer here: part memory is left out"
        return
    }
    for topic in $(topics); do
        for tool in memcheck synccheck racecheck initcheck; do
            part "$tool-$topic" env MOH_REQUIRE_CUDA="$required" compute-sanitizer --tool "$tool" --error-exitcode 1 \
                "$home/bin/test-cuda" "$topic::" --test-threads=1
        done
    done
}

main() {
    if [ -z "${MOH_CUDA_DRIVER:-}" ] && ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
        echo "gpu: there is no GPU here: nothing was run"
        [ "${MOH_REQUIRE_CUDA:-0}" != 1 ]
        exit
    fi
    unpack
    # On the emulator the tests must not insist on a GPU.
    required=1
    [ -z "${MOH_CUDA_DRIVER:-}" ] || required=0
    LD_LIBRARY_PATH=$(cuda_folders)${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    PYTHONPATH=$home/python${PYTHONPATH:+:$PYTHONPATH}
    export LD_LIBRARY_PATH PYTHONPATH PYTHONUNBUFFERED=1
    quick=()
    [ "${MOH_GPU_QUICK:-0}" != 1 ] || quick=(--quick)
    for name in "${@:-tests memory kernels models}"; do
        for one in $name; do
            case $one in
            tests) run_tests ;;
            memory) run_memory ;;
            kernels) part kernels python3 ci/gpu/kernels.py "$home/bin/libmoh_cuda.so" "$out/kernels.json" "${quick[@]}" ;;
            models)
                part models python3 ci/gpu/models.py "$home/bin/moh-export" "$home/bin/libmoh_ops.so" "$home/bin" \
                    "$home/models" "$out/models.json"
                ;;
            *) usage >&2 && exit 2 ;;
            esac
        done
    done
    # Lines of tables and their titles.
    grep -hE '^(\||###|seed )' "$out"/kernels.log "$out"/models.log >"$out/tables.md" 2>/dev/null || true
    if [ ${#failed[@]} -gt 0 ]; then
        printf '\nfailed: %s\n' "${failed[*]}"
        exit 1
    fi
    printf '\nall parts passed; results are in %s\n' "$out"
}

case ${1:-} in
--pack) pack_all "${2:-}" ;;
--keep) keep ;;
-h | --help) usage ;;
*) main "$@" ;;
esac
