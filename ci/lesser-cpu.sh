#!/usr/bin/env bash
# Runs a program as on a lesser processor: without AMX (avx512), without AVX-512 too (avxvnni), or without AVX-VNNI as well (avx2). All
# libraries that ask the processor what it has believe it; caches and clocks stay what they are.
#
# usage: ci/lesser-cpu.sh avx512|avxvnni|avx2 COMMAND [ARGUMENT]...
#
# Needs Linux on an x86-64 processor that can fault on CPUID (`cpuid_fault` in /proc/cpuinfo), and a C compiler.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
[[ ${1:-} =~ ^(avx512|avxvnni|avx2)$ ]] && [[ $# -ge 2 ]] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2 && exit 2; }
library=$root/target/lesser-cpu.so
mkdir -p "$root/target"
[[ $library -nt $root/ci/lesser-cpu.c ]] || cc -O2 -Wall -Wextra -shared -fPIC -o "$library" "$root/ci/lesser-cpu.c"
export MOH_LESSER_CPU=$1 LD_PRELOAD=$library${LD_PRELOAD:+:$LD_PRELOAD}
shift
exec "$@"
