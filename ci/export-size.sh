#!/usr/bin/env bash
# Exports a checkpoint of random weights, and compares time and memory with those of a plain copy of the same bytes.
#
# usage: ci/export-size.sh [PRESET|config.json [FOLDER [DTYPE]]]
#
# Without arguments: a model of 0.6 GB in bfloat16 in a temporary folder. `ci/export-size.sh moh-llama3-8b FOLDER` needs 48 GB there.
# DTYPE is the export's (default: the exporter's own choice). Exits with 1 where the export needs more than 500 MB of memory; pages of
# files count. Needs a release build of moh-export, Linux and Python 3.
set -euo pipefail
cd "$(dirname "$0")/.."

program=$PWD/target/release/moh-export
[ -x "$program" ] || cargo build --release --locked
folder=$(mktemp -d "${2:-${TMPDIR:-/tmp}}/export-size.XXXXXX")
trap 'rm -rf "$folder"' EXIT

model=${1:-}
if [ -z "$model" ]; then
    model=$folder/config.json
    cat > "$model" <<'CONFIG'
{"family": "moh-llama", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 1,
 "intermediate_size": 8192, "vocab_size": 64000, "max_position_embeddings": 8192}
CONFIG
fi

"$program" random "$model" -o "$folder/checkpoint" --dtype bf16 --json > "$folder/random.json"
sync
"$program" "$folder/checkpoint" -o "$folder/out/model.onnx" ${3:+--dtype "$3"} --no-verify --json > "$folder/report.json"

python3 - "$folder" <<'PYTHON'
"""Copies the checkpoint's files with read and write, syncs, and prints both."""
import glob
import json
import os
import sys
import time

folder = sys.argv[1]
report = json.load(open(folder + "/report.json"))
begun, size = time.monotonic(), 0
for path in sorted(glob.glob(folder + "/checkpoint/*.safetensors")):
    with open(path, "rb", buffering=0) as source, open(folder + "/copy", "wb", buffering=0) as target:
        while part := source.read(1 << 20):
            target.write(part)
            size += len(part)
        os.fsync(target.fileno())
copy = time.monotonic() - begun
written = sum(file["bytes"] for file in report["files"])
seconds, peak = report["seconds"], report["peak_memory"]
print(f"plain copy  {size / 1e9:6.2f} GB in {copy:7.1f} s: {size / copy / 1e6:5.0f} MB/s")
print(f"export      {written / 1e9:6.2f} GB in {seconds:7.1f} s: {written / seconds / 1e6:5.0f} MB/s, at most {peak / 1e6:.0f} MB of memory")
print(f"speed       {written / seconds / (size / copy):.2f} of the copy's")
sys.exit(peak > 500e6)
PYTHON
