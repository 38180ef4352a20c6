#!/usr/bin/env bash
# Trains all models of docs/results.md, and prints its tables: ci/results.sh [FOLDER], target/results unless told otherwise.
#
#   SEEDS="0 1 2"   seeds of each model
#   JOBS=2          trainings at a time, of one thread each
#
# Takes about two hours on two cores, and goes on after an interruption. Needs onnxruntime (ORT_DYLIB_PATH) for the times.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-target/results}
cargo build --release --workspace --exclude moh-cuda
cargo build --release --example results
examples/train/fetch.sh
released=$(realpath -m "${CARGO_TARGET_DIR:-target}")/release
results=$released/examples/results
mkdir -p "$folder"
for seed in ${SEEDS:-0 1 2}; do
    "$results" list | while read -r task model; do
        printf '%s %s --seed %s\n' "$task" "$model" "$seed"
    done
done | RAYON_NUM_THREADS=1 xargs -P "${JOBS:-2}" -L 1 "$results" run "$folder"
MOH_OPS_LIBRARY=${MOH_OPS_LIBRARY:-$released/libmoh_ops.so} "$results" table "$folder" | tee "$folder/results.md"
