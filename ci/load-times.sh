#!/bin/sh
# How long onnxruntime takes to make a session of exported models, in the versions that ci/ort-versions.sh has fetched.
#
# usage: ci/load-times.sh MODEL.onnx ...
#
# Prints a row a model and version: seconds without the library, with it, and for the model's matrices alone in bare MatMuls, which
# is what onnxruntime needs to read and pack the weights. Each is the shortest of three; sessions have one thread.
#
# MOH_CACHE        where the environments are    (target/ort-versions)
# MOH_OPS_LIBRARY  the library                   (libmoh_ops.so of a release build)
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
cache=${MOH_CACHE:-$root/target/ort-versions}
library=${MOH_OPS_LIBRARY:-${CARGO_TARGET_DIR:-$root/target}/release/libmoh_ops.so}
[ -f "$cache/cases/complete" ] || { echo "load-times: run ci/ort-versions.sh first" >&2; exit 1; }

echo '| model | onnxruntime | without the library s | with it s | its matrices alone s |'
echo '|---|---|--:|--:|--:|'
for model in "$@"; do
    bare=$(dirname "$model")/.bare.onnx
    "$cache/cases/bin/python" "$root/ci/load_times.py" bare "$model" "$bare"
    for environment in "$cache"/1.*/; do
        version=$(basename "$environment")
        seconds=$("$environment/bin/python" "$root/ci/load_times.py" time "$model" "$library" "$bare" 2>/dev/null) || continue # 1.17 reads no default export
        echo "| $model | $version | $seconds |"
    done
    rm -f "$bare"
done
