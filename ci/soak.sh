#!/usr/bin/env bash
# A short run of every attack of docs/reliability.md, which tells how to run each one longer. For nightly builds: it takes about half an hour,
# after a build.
#
# usage: ci/soak.sh [SECONDS]      (of each fuzz target; default: 30)
#
# Needs what ci/test.sh needs, a C compiler, and for the fuzz targets nightly Rust, cargo-fuzz and a C++ compiler. Fails where something is found.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-30}
step() { printf '\n== %s\n' "$*"; }

step "build"
cargo build --release --locked --workspace --exclude moh-cuda --bins --examples
cargo build --release --locked --workspace --exclude moh-cuda
ORT_DYLIB_PATH=$(ci/fetch-onnxruntime.sh "$PWD/target/onnxruntime")
export ORT_DYLIB_PATH

step "exports that end at every moment"
ci/crash/crash.py --runs 60

step "the library and its operators"
ci/attack/run.sh "$seconds" 2000

step "fuzz targets"
ci/fuzz.sh "$seconds"

printf '\nnothing was found\n'
