#!/usr/bin/env bash
# Whether ci/gpu.sh judges what compute-sanitizer prints, and unpacks what was packed last. Run by ci/gpu.sh --dry-run; needs no GPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export MOH_GPU_HOME=$scratch/home
mkdir -p "$MOH_GPU_HOME/bin" "$scratch/tools"

# same WHAT EXPECTED FOUND
same() {
    [ "$2" = "$3" ] || {
        echo "$1: expected $2, found $3"
        exit 1
    }
}

# A test program and a compute-sanitizer that print and return what the variables say.
cat >"$MOH_GPU_HOME/bin/test-cuda" <<'PROGRAM'
#!/bin/sh
printf '%b\n' "$TESTS"
exit "$CODE"
PROGRAM
cat >"$scratch/tools/compute-sanitizer" <<'PROGRAM'
#!/bin/sh
printf '%b\n' "$PRINTS"
exit "$STATUS"
PROGRAM
chmod +x "$MOH_GPU_HOME/bin/test-cuda" "$scratch/tools/compute-sanitizer"
passed='test result: ok. 3 passed; 0 failed'
export TESTS=$passed CODE=0 PRINTS STATUS

# judged EXPECTED STATUS LINES: the exit status of `sanitize` where the tool ends with STATUS.
judged() {
    local code=0
    STATUS=$2 PRINTS=$3
    PATH=$scratch/tools:$PATH ci/gpu.sh --run sanitize memcheck some_test >"$scratch/said" 2>&1 || code=$?
    same "sanitize: $3" "$1" "$code"
}
judged 0 0 "$passed\n========= ERROR SUMMARY: 0 errors"
judged 0 0 "$passed\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
# The tool stops the kernel, and the test panics.
judged 1 101 '========= Invalid __global__ read of size 4 bytes\ntest result: FAILED\n========= ERROR SUMMARY: 1 error'
judged 1 101 '========= Invalid __shared__ write of size 4 bytes'
judged 1 99 "$passed\n========= ERROR SUMMARY: 12 errors"
judged 1 0 "$passed\n========= ERROR SUMMARY: 12 errors"
judged 1 0 "$passed\n========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"
judged 1 0 "$passed\n========= Error: Race reported between Write access and Read access\n========= ERROR SUMMARY: 0 errors"
judged 1 0 "$passed\n========= Uninitialized __global__ memory read of size 4 bytes\n========= ERROR SUMMARY: 0 errors"
judged 1 0 "$passed\n========= Barrier error detected. Divergent thread(s) in block\n========= ERROR SUMMARY: 0 errors"
# A test of ours fails, or none has this name.
judged 101 101 'test result: FAILED\n========= ERROR SUMMARY: 0 errors'
judged 1 0 'test result: ok. 0 passed; 0 failed\n========= ERROR SUMMARY: 0 errors'
# The tool cannot work here.
judged 77 1 '========= Error: device not supported'
CODE=101 TESTS='test result: FAILED' judged 1 1 '========= Error: device not supported'
TESTS='test result: ok. 0 passed; 0 failed' judged 1 1 '========= Error: device not supported'

# pack TEXT FOLDER: a program with these contents, as the pieces of a pack.
pack() {
    rm -rf "$scratch/programs" "$2"
    mkdir -p "$scratch/programs" "$2"
    echo "$1" >"$scratch/programs/program"
    python3 ci/gpu/archive.py pack "$scratch/programs" "$2/moh-gpu"
}
# carried FOLDER...: as on the GPU machine, with these folders in target/gpu; says what is unpacked.
carried() {
    # `target/gpu` is in the checkout: a copy has its own.
    rm -rf "$scratch/tree/target/gpu"
    mkdir -p "$scratch/tree/target/gpu"
    cp -rp "$@" "$scratch/tree/target/gpu/"
    if ! "$scratch/tree/ci/gpu.sh" --run unpack >"$scratch/said" 2>&1; then
        grep -o 'lacks pieces\|damaged' "$scratch/said" || cat "$scratch/said"
    else
        cat "$MOH_GPU_HOME/bin/program"
    fi
}
mkdir -p "$scratch/tree"
cp -r ci "$scratch/tree/ci"
pack first "$scratch/1"
same "the first pack" first "$(carried "$scratch/1")"
mkdir "$MOH_GPU_HOME/models"
touch "$MOH_GPU_HOME/bin/kept"
same "the same pack again" first "$(carried "$scratch/1")"
[ -f "$MOH_GPU_HOME/bin/kept" ] && [ -d "$MOH_GPU_HOME/models" ] || same "the same pack again" "as it was" "unpacked anew"
sleep 1
pack second "$scratch/2"
# The old pieces may still be there, in another folder.
same "a second pack" second "$(carried "$scratch/1" "$scratch/2")"
[ ! -e "$MOH_GPU_HOME/bin/kept" ] && [ ! -e "$MOH_GPU_HOME/models" ] || same "what the first pack left" removed kept
same "pieces" 1 "$(find "$MOH_GPU_HOME" -name 'moh-gpu.*.[0-9][0-9]' | wc -l)"
# Pieces that come in two calls.
sleep 1
pack third "$scratch/3"
piece=$(basename "$scratch"/3/moh-gpu.*)
for number in 00 01; do
    mkdir "$scratch/3.$number"
done
head -c 100 "$scratch/3/$piece" >"$scratch/3.00/${piece%.1.00}.2.00"
tail -c +101 "$scratch/3/$piece" >"$scratch/3.01/${piece%.1.00}.2.01"
same "half of a pack, beside all of the second, unpacked" "lacks pieces" "$(carried "$scratch/3.00")"
same "a pack in two calls" third "$(carried "$scratch/3.01")"
sleep 1
mkdir "$scratch/damaged"
echo damaged >"$scratch/damaged/moh-gpu.0123456789ab.1.00"
same "damaged pieces" damaged "$(carried "$scratch/damaged")"
