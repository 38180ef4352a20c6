#!/usr/bin/env bash
# Writes the man pages of moh-export and moh-run, a page for each command, to a folder.
#
# usage: ci/man.sh OUT
set -euo pipefail

if [ $# -ne 1 ]; then
    echo "usage: ci/man.sh OUT" >&2
    exit 2
fi
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."

cargo build --quiet --release --locked -p moh-export -p moh-run
for program in moh-export moh-run; do
    "${CARGO_TARGET_DIR:-target}/release/$program" man "$out"
done
ls "$out"
