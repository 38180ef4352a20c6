#!/usr/bin/env bash
# Measures this machine, and writes the tables of docs/performance.md between its marks.
#
# usage: ci/bench.sh [--write] [operators|models|growth ...] [--threads 1,2] [--seconds 2] [--only TEXT]
#        ci/bench.sh [--write] llm --model MODEL.onnx [--folder FOLDER] [--threads 2] [--seconds 4] [--only TEXT]
#        ci/bench.sh --against REV [--threads 1,2] [--seconds 3] [--only TEXT] [--large]
#
# Without arguments: everything, an hour or so, and the document is written. With some, the tables are printed alone, unless the first
# is --write. Nothing else should run meanwhile. Needs what ci/test.sh needs, and 20 GB of memory for the largest models.
#
# --against prints how long the working tree takes compared with the commit REV, both in turns on the same models; --large adds models of
# several GB. REV is built in target/against, the first time with all dependencies, which takes many minutes.
#
# llm measures an exported language model against a dense one of its shape, which is written to FOLDER: as large as an int4 export.
set -euo pipefail
cd "$(dirname "$0")/.."

document=docs/performance.md
mkdir -p target/bench
tables=target/bench/tables.md

built=$(realpath -m "${CARGO_TARGET_DIR:-target}")/dist
cargo build --profile dist --locked --workspace
cargo build --profile dist --locked --example bench
ORT_DYLIB_PATH=$(ci/fetch-onnxruntime.sh "$PWD/target/onnxruntime")
MOH_OPS_LIBRARY=$built/libmoh_ops.so
export ORT_DYLIB_PATH MOH_OPS_LIBRARY

if [[ ${1:-} == --against ]]; then
    exec ci/bench_against.py "$@"
elif [[ ${1:-} == --write ]]; then
    shift
elif [[ $# -gt 0 ]]; then
    exec "$built/examples/bench" "$@"
fi
# Language models have tables of their own.
marks=tables
[[ ${1:-} == llm ]] && marks="language model tables"
grep -q "^<!-- $marks begin" "$document" || { echo "$document has no marks for $marks" >&2 && exit 1; }
{
    printf 'Measured on %s, onnxruntime %s.\n\n' "$(date -u +%Y-%m-%d)" "${ORT_DYLIB_PATH##*.so.}"
    "$built/examples/bench" --json target/bench/tables.json "$@"
} | tee "$tables"

awk -v tables="$tables" -v marks="$marks" '
    $0 ~ "^<!-- " marks " end -->" { skip = 0 }
    !skip { print }
    $0 ~ "^<!-- " marks " begin" { while ((getline line < tables) > 0) print line; skip = 1 }
' "$document" > "$tables.document"
mv "$tables.document" "$document"
