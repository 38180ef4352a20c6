#!/usr/bin/env bash
# Builds libmoh_ops.so twice as it is shipped, from two clones of this commit in folders of other names, and with cargo's files in two places:
# it has to be the same, byte for byte.
#
# usage: ci/reproducible.sh
#
# Needs what ci/wheel.sh needs. Takes some minutes.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
home=${CARGO_HOME:-$HOME/.cargo}
ln -s "$home" "$work/another-home-of-cargo"
mkdir -p target/tools

build() {
    git clone --quiet . "$1"
    mkdir -p "$1/target"
    ln -s "$PWD/target/tools" "$1/target/tools"
    (cd "$1" && CARGO_HOME=$2 CARGO_TARGET_DIR=$1/target ci/wheel.sh --library)
}
one=$(build "$work/one" "$home")
two=$(build "$work/a-folder-of-another-length" "$work/another-home-of-cargo")
sha256sum "$one" "$two"
cmp "$one" "$two"
if strings "$one" | grep -F -e "$work" -e "$home"; then
    echo "reproducible: $one names folders of this machine" >&2
    exit 1
fi
echo "the same bytes"
