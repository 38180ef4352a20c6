#!/usr/bin/env bash
# Shows what the CUDA kernels take: registers, shared memory, spills, and the instructions that matter.
#
# usage: ci/cuda-report.sh                    a table of all kernels (Markdown), from the last build with feature cuda
#        ci/cuda-report.sh --check LIBRARY    whether a library links no CUDA library; its size and that of the kernels in it
#
# Registers, stack and spills are ptxas' words; bytes of shared memory are static ones, kernels ask for more when they are launched.
# Instructions are counted in the disassembly: HGMMA is wgmma, HMMA mma.sync, UTMALDG a TMA load, LDGSTS cp.async, LDL and STL local
# memory. Needs ci/cuda-toolchain.sh's tools.
set -euo pipefail
cd "$(dirname "$0")/.."

latest() { # the newest build's file of that name
    find "${CARGO_TARGET_DIR:-target}/release/build" -path "*/moh-kernels-*/out/$1" -printf '%T@ %p\n' 2>/dev/null |
        sort -nr | sed -n '1s/^[^ ]* //p'
}
resources=$(latest resources.tsv)
if [ -z "$resources" ]; then
    echo "cuda-report: no build: cargo build --release -p moh-kernels --features cuda" >&2
    exit 1
fi
images=$(dirname "$resources")

if [ "${1:-}" = --check ]; then
    library=${2:?usage: ci/cuda-report.sh --check LIBRARY}
    if ldd "$library" | grep -iE 'libcuda|libcublas|libnv'; then
        echo "cuda-report: $library links a CUDA library" >&2
        exit 1
    fi
    if nm -D --undefined-only "$library" | grep -E ' cu[A-Z]'; then
        echo "cuda-report: $library needs a function of CUDA" >&2
        exit 1
    fi
    kernels=$(cat "$images"/*.fatbin | wc -c)
    echo "$library: $(stat -Lc %s "$library") bytes, of which $kernels are CUDA kernels; links no CUDA library"
    exit
fi

tools=$(dirname "$(ci/cuda-toolchain.sh)")
counts=$(mktemp)
trap 'rm -f "$counts"' EXIT
for image in "$images"/*.fatbin; do
    # The modules of the last build: images of files that are gone stay behind.
    grep -q "^$(basename "$image" .fatbin)	" "$resources" || continue
    PATH=$tools:$PATH "$tools/cuobjdump" --dump-sass "$image"
done | awk '
    function flush() { if (kernel != "") print kernel "\t" target "\t" hg "\t" hm "\t" tma "\t" ldgsts "\t" local_memory }
    /arch = sm_/ { flush(); kernel = ""; target = $NF }
    /Function : / { flush(); kernel = $NF; hg = hm = tma = ldgsts = local_memory = 0 }
    / HGMMA/ { hg++ } / HMMA/ { hm++ } / UTMALDG/ { tma++ } / LDGSTS/ { ldgsts++ } / (LDL|STL)/ { local_memory++ }
    END { flush() }' >"$counts"
printf '| module | kernel | target | registers | shared | stack | spilled | HGMMA | HMMA | UTMALDG | LDGSTS | LDL, STL |\n'
printf '|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n'
awk -F '\t' -v OFS=' | ' '
    FNR == NR { rest[$1, $2] = $3 " | " $4 " | " $5 " | " $6 " | " $7; next }
    FNR > 1 { print "| " $1, $2, $3, $4, $5, $6, ($7 > $8 ? $7 : $8), rest[$2, $3] " |" }' "$counts" "$resources"
