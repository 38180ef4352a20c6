#!/usr/bin/env bash
# Attacks libmoh_ops.so, and tract's operators: malformed nodes, threads, little memory. Prints a line each.
#
# usage: ci/attack/run.sh [SECONDS] [NODES]      (of each attack with threads, and malformed nodes; default: 60 6000)
#
# Needs a build (cargo build --release --workspace --bins --examples, and libmoh_ops.so) and python3 with pip; onnxruntime comes from PyPI.
set -euo pipefail
cd "$(dirname "$0")/../.."

seconds=${1:-60} nodes=${2:-6000}
ORT_DYLIB_PATH=$(ci/fetch-onnxruntime.sh "$PWD/target/onnxruntime")
released=$(realpath -m "${CARGO_TARGET_DIR:-target}")/release
library=${MOH_OPS_LIBRARY:-$released/libmoh_ops.so}
export ORT_DYLIB_PATH MOH_OPS_LIBRARY=$library
environment=target/attack/python
if [[ ! -f $environment/complete ]]; then
    rm -rf "$environment"
    python3 -m venv "$environment"
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check onnxruntime==1.31.1 numpy
    touch "$environment/complete"
fi

printf '== malformed nodes\n'
# What each session refuses is onnxruntime's to log.
"$released/examples/attack" 0 "$nodes" 2> >(grep -a '^attack:' >&2 || true)
printf '\n== threads, sessions, memory\n'
"$released/moh-export" examples/checkpoints/shakespeare-moh-llama -o target/attack/model/model.onnx --force --quiet
"$environment/bin/python" ci/attack/threads.py "$library" target/attack/model --seconds "$seconds"
