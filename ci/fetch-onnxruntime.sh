#!/bin/sh
# Fetches onnxruntime's shared library for tests, and prints its path.
#
# usage: ci/fetch-onnxruntime.sh DIR [VERSION]
#
# The library comes out of the Python wheel of that version (1.19 or newer: older wheels hold no shared library).
# What is already in DIR is not fetched again.
set -eu

if [ $# -lt 1 ] || [ $# -gt 2 ]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
dir=$1
version=${2:-1.31.1}
python=${PYTHON:-python3}
library=$dir/libonnxruntime.so.$version

fail() {
    echo "fetch-onnxruntime: $*" >&2
    exit 1
}

if [ ! -f "$library" ]; then
    machine=$(uname -m)
    case $(uname -s)-$machine in
    Linux-x86_64 | Linux-aarch64) ;;
    *) fail "no wheel with a shared library is known for $(uname -s) on $machine" ;;
    esac
    "$python" -m pip --version >/dev/null 2>&1 || fail "needs $python with pip; set PYTHON to another interpreter"

    mkdir -p "$dir"
    # Beside the library, so that the last step is a rename.
    work=$(mktemp -d "$dir/.fetch.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    # The interpreter of the wheel does not matter: only its shared library is used.
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
        --platform "manylinux_2_28_$machine" --platform "manylinux_2_27_$machine" \
        --implementation cp --python-version 3.12 --abi cp312 \
        --dest "$work" "onnxruntime==$version" >&2 || fail "pip could not download onnxruntime $version"
    "$python" -m zipfile -e "$work"/onnxruntime-*.whl "$work/wheel"
    [ -f "$work/wheel/onnxruntime/capi/libonnxruntime.so.$version" ] ||
        fail "the wheel of onnxruntime $version holds no libonnxruntime.so.$version"
    mv "$work/wheel/onnxruntime/capi/libonnxruntime.so.$version" "$library"
fi
echo "$library"
