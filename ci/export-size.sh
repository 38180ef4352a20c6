#!/usr/bin/env bash
# Exports checkpoints of random weights, and compares time and memory with those of a plain copy (cp) of as many bytes.
#
# usage: ci/export-size.sh [PRESET|config.json [FOLDER [FROM:TO...]]]
#
# FROM and TO are element types of checkpoint and model: f32:f32 f16:f16 bf16:f16 bf16:f32 without arguments. Copies and exports take
# turns, three of each, all from a warm page cache and until the bytes are on the disk; the fastest of each count. An export that prints
# JSON also takes the SHA-256 of what it writes. Without arguments:
# a model of 3 GB in float32 in a temporary folder, which needs 9 GB there. `ci/export-size.sh moh-llama3-8b FOLDER bf16:f16` needs
# 48 GB. Exits with 1 where an export needs more than 500 MB of memory; mapped pages of files count. Needs a release build of
# moh-export, Linux and Python 3.
set -euo pipefail
cd "$(dirname "$0")/.."

program=$(realpath -m "${CARGO_TARGET_DIR:-target}")/release/moh-export
[ -x "$program" ] || cargo build --release --locked
folder=$(mktemp -d "${2:-${TMPDIR:-/tmp}}/export-size.XXXXXX")
trap 'rm -rf "$folder"' EXIT

model=${1:-}
if [ -z "$model" ]; then
    model=$folder/config.json
    cat > "$model" <<'CONFIG'
{"family": "moh-llama", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 8,
 "intermediate_size": 8192, "vocab_size": 64000, "max_position_embeddings": 8192}
CONFIG
fi
pairs=("${@:3}")
[ ${#pairs[@]} -gt 0 ] || pairs=(f32:f32 f16:f16 bf16:f16 bf16:f32)

python3 - "$program" "$model" "$folder" "${pairs[@]}" <<'PYTHON'
"""Writes a checkpoint for each pair of types, and prints how long exports and copies take."""
import glob
import json
import os
import shutil
import subprocess
import sys
import time

program, model, folder, pairs = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]
ROUNDS = 3
checkpoint, out, copy = folder + "/checkpoint", folder + "/out", folder + "/copy"


def run(*arguments):
    return json.loads(subprocess.run([program, *arguments, "--json"], check=True, stdout=subprocess.PIPE).stdout)


def warm(path):
    with open(path, "rb", buffering=0) as file:
        while file.read(1 << 22):
            pass


def timed_copy(path):
    begun = time.monotonic()
    subprocess.run(["cp", path, copy], check=True)
    with open(copy, "rb+") as file:
        os.fsync(file.fileno())
    seconds = time.monotonic() - begun
    os.remove(copy)
    return seconds


worst = 0
print("checkpoint  model  GB written  copy MB/s  export MB/s  (share)  with SHA-256  (share)  memory, MB")
for pair in pairs:
    stored, written = pair.split(":")
    run("random", model, "-o", checkpoint, "--dtype", stored)
    subprocess.run(["sync", "-f", folder], check=True)
    copies, exports, digests = [], [], []
    for _ in range(ROUNDS):
        for path in glob.glob(checkpoint + "/*.safetensors"):
            warm(path)
        arguments = [checkpoint, "-o", out + "/model.onnx", "--dtype", written, "--no-verify", "--force"]
        # As for the copy, there is no older file that has to go.
        shutil.rmtree(out, ignore_errors=True)
        begun = time.monotonic()
        subprocess.run([program, *arguments, "--quiet"], check=True)
        exports.append(time.monotonic() - begun)
        shutil.rmtree(out, ignore_errors=True)
        report = run(*arguments)
        data = next(file for file in report["files"] if file["path"].endswith("_data"))
        digests.append(report["seconds"])
        warm(data["path"])
        copies.append(timed_copy(data["path"]))
        worst = max(worst, report["peak_memory"])
    size, plain = data["bytes"], min(copies)
    speed = [size / seconds / 1e6 for seconds in (plain, min(exports), min(digests))]
    print(
        f"{stored:10}  {written:5}  {size / 1e9:10.2f}  {speed[0]:9.0f}  {speed[1]:11.0f}  {speed[1] / speed[0]:6.2f}"
        f"  {speed[2]:13.0f}  {speed[2] / speed[0]:6.2f}  {report['peak_memory'] / 1e6:10.0f}",
        flush=True,
    )
    shutil.rmtree(checkpoint)
    shutil.rmtree(out)
sys.exit(worst > 500e6)
PYTHON
