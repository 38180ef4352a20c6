#!/bin/sh
# Builds the CUDA kernels for the CPU, as a stand-in for NVIDIA's driver library, and prints its path.
#
# usage: ci/cuda-emulator.sh [DIR]
#
# DIR is target/cuda-emulator without an argument. With MOH_CUDA_DRIVER set to the path, the launchers run on the emulator: slow, for
# tests of a few tokens. Needs g++. Only what changed is compiled again.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
dir=${1:-$root/target/cuda-emulator}
kernels=$root/custom-ops/cuda/kernels
library=$dir/libcuda-emulator.so

command -v g++ >/dev/null || {
    echo "cuda-emulator: needs g++" >&2
    exit 1
}
mkdir -p "$dir"
exec 9>"$dir/lock"
flock 9 # tests of several crates may ask at the same time

headers=$(find "$kernels" -name '*.h' -o -name '*.cuh')
stale=
objects=
for source in "$kernels"/*.cu "$kernels"/emulator/*.cpp; do
    object=$dir/$(basename "$source").o
    objects="$objects $object"
    # shellcheck disable=SC2086 # a list
    if [ ! -f "$object" ] || [ -n "$(find "$source" $headers -newer "$object")" ]; then
        stale="$stale $source"
    fi
done
if [ -n "$stale" ]; then
    # shellcheck disable=SC2016,SC2086
    printf '%s\n' $stale | xargs -P "${MOH_JOBS:-2}" -I SOURCE sh -c '
        g++ -std=c++17 -O2 -g1 -fPIC -Wall -Wno-unknown-pragmas -DMOH_EMULATE -I"$2" -x c++ -c "$1" -o "$3/$(basename "$1").o.new" &&
            mv "$3/$(basename "$1").o.new" "$3/$(basename "$1").o"' compile SOURCE "$kernels" "$dir" >&2
fi
# shellcheck disable=SC2086
if [ ! -f "$library" ] || [ -n "$(find $objects -newer "$library")" ]; then
    g++ -shared -Wl,-soname,libcuda.so -o "$library.new" $objects -lm >&2
    mv "$library.new" "$library"
fi
echo "$library"
