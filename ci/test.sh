#!/usr/bin/env bash
# Builds everything, and runs the tests with onnxruntime and libmoh_ops.so in place.
#
# Left out, with a note, are the tests of data that is too large for the repository: MOH_GOLDEN names a folder that holds it
# (models/tests/it/golden.rs, tests/it/parity_vit.rs).
#
# Needs Rust, python3 and pip. onnxruntime is fetched from PyPI into target/onnxruntime once, and nvcc into target/cuda: the CUDA
# kernels are compiled and run on an emulator. Where nvcc cannot be had or there is no g++, they are left out, with a note.
set -euo pipefail
cd "$(dirname "$0")/.."

missing() {
    echo "error: $1 is needed: $2" >&2
    exit 1
}
command -v cargo >/dev/null || missing cargo "install Rust, https://rustup.rs"
command -v python3 >/dev/null || missing python3 "it fetches onnxruntime, and runs it in the versions that users have"
python3 -m pip --version >/dev/null 2>&1 || missing "pip for python3" "Debian calls it python3-pip"

step() { printf '\n== %s (after %d:%02d minutes)\n' "$*" $((SECONDS / 60)) $((SECONDS % 60)); }
export PIP_DISABLE_PIP_VERSION_CHECK=1
released=$(realpath -m "${CARGO_TARGET_DIR:-target}")/release

step "build"
cargo build --release --locked --workspace

step "onnxruntime"
# Absolute, because each crate's tests run in its own folder.
ORT_DYLIB_PATH=$(ci/fetch-onnxruntime.sh "$PWD/target/onnxruntime")
export ORT_DYLIB_PATH MOH_REQUIRE_ORT=1
echo "$ORT_DYLIB_PATH"

step "tests"
cargo test --release --locked --workspace --no-fail-fast

step "tests of data that is not in the repository"
if [[ -n ${MOH_GOLDEN:-} ]]; then
    cargo test --release --locked --workspace --exclude moh-cuda --test it -- --ignored --exact \
        golden::vit_with_routing_in_late_stages parity_vit::routing_in_late_stages
else
    echo "note: MOH_GOLDEN is not set: the golden case vit-tiny-a is left out" >&2
fi

step "CUDA kernels"
if ci/cuda-toolchain.sh; then
    # Two crates, compiled among all others: by themselves they would have dependencies with fewer features, compiled again. Without the tests
    # of everything, which use the library.
    features=(--release --locked --workspace --exclude moh --features moh-cuda/kernels,moh-ops/cuda)
    cargo test "${features[@]}" --no-run --message-format=json-render-diagnostics >target/cuda-tests.json
    programs=$(ci/test_programs.py moh-cuda moh-ops <target/cuda-tests.json)
    mapfile -t tests <<<"$programs"
    MOH_CUDA_DRIVER=$(ci/cuda-emulator.sh)
    export MOH_CUDA_DRIVER
    # The emulator runs one kernel at a time in a process, hence two: linear operators, and all others.
    linear=(head_linear:: nbits:: routed_mlp::)
    run_tests() {
        local program status=0
        for program in "${tests[@]}"; do
            printf '\n%s\n' "$program"
            (cd "${program%%$'\t'*}" && "${program##*$'\t'}" "$@") || status=1
        done
        return $status
    }
    run_tests "${linear[@]}" >target/cuda-linear.log 2>&1 &
    run_tests "${linear[@]/#/--skip=}" || failed=1
    wait $! || failed=1
    cat target/cuda-linear.log
    [[ ${failed:-0} == 0 ]]
    unset MOH_CUDA_DRIVER
    cargo build "${features[@]}"
    ci/cuda-report.sh --check "$released/libmoh_ops.so"
    # Another compiler counts otherwise.
    ci/cuda-report.sh --drift || echo "note: docs/cuda-resources.md is of another build" >&2
    # What follows runs with this library, on a machine that need not have a GPU.
    export MOH_OPS_LIBRARY=$released/libmoh_ops.so
else
    echo "note: no CUDA compiler: the CUDA kernels are not compiled" >&2
fi

# Operator set 20 and IR 9 load in the oldest version too.
step "onnxruntime, old and new"
models=()
for checkpoint in examples/checkpoints/*/; do
    model=target/ci-models/$(basename "$checkpoint")/model.onnx
    "$released/moh-export" "$checkpoint" -o "$model" --opset 20 --ir-version 9 --force --quiet
    models+=("$model")
done
# What a user gets who asks for no versions loads from 1.18 on.
"$released/moh-export" examples/checkpoints/digits-moh-vit -o target/ci-models/default/model.onnx --force --quiet
models+=(target/ci-models/default/model.onnx)
# Dense layers as operators of ours: a body with numbers in the place of gates, and one with a string for its GELU.
"$released/moh-export" examples/checkpoints/digits-moh-dit -o target/ci-models/layers/model.onnx --for ort-cpu --opset 20 --ir-version 9 --force --quiet
models+=(target/ci-models/layers/model.onnx)
# Depthwise convolutions, too.
"$released/moh-export" examples/checkpoints/digits-moh-vit -o target/ci-models/images/model.onnx --for ort-cpu --opset 20 --ir-version 9 --force --quiet
models+=(target/ci-models/images/model.onnx)
# The weights in the checkpoint's own file; and quantised, with the cache in place.
text=examples/checkpoints/shakespeare-moh-llama
for options in "linked --weights link" "quantised --quantize int4 --form moh --cache in-place"; do
    read -ra options <<<"$options"
    model=target/ci-models/${options[0]}/model.onnx
    "$released/moh-export" "$text" -o "$model" --opset 20 --ir-version 9 --force --quiet "${options[@]:1}"
    models+=("$model")
done
if [[ -z ${MOH_ORT_VERSIONS:-} ]] && ! python3 -c 'import sys; sys.exit(sys.version_info >= (3, 13))'; then
    echo "note: old onnxruntime has no packages for $(python3 --version): only 1.32.0 is tried" >&2
    export MOH_ORT_VERSIONS=1.32.0
fi
ci/ort-versions.sh "${models[@]}"

# The wheel of what was built here; ci/wheel_check.sh without versions tries others, and ci/wheel.sh builds the wheel that is shipped.
step "Python package"
if python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    python=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    ci/wheel_check.sh "$(MOH_WHEELS=target/wheels-of-tests ci/wheel.sh --pack "$released")" "$python=1.31.1"
else
    echo "note: the package's tests need Python 3.11 or newer, this is $(python3 --version): they are not run" >&2
fi

# With --torch it also runs the recipe that needs PyTorch.
step "recipes"
if python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    ci/recipes.sh
else
    echo "note: docs/recipes.md needs Python 3.11 or newer, this is $(python3 --version): its recipes are not run" >&2
fi

printf '\nall tests passed\n'
