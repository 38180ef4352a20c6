#!/usr/bin/env bash
# Shows what the CUDA kernels take: registers, shared memory, spills, and the instructions that matter.
#
# usage: ci/cuda-report.sh                    a table of all kernels (Markdown), from the last build with feature kernels
#        ci/cuda-report.sh --write            the same as docs/cuda-resources.md, after a run of the kernels on the emulator
#        ci/cuda-report.sh --drift            whether that file's registers and spills are those of the last build
#        ci/cuda-report.sh --launches         which kernels a call of each operator launches, by the emulator's log
#        ci/cuda-report.sh --check LIBRARY    whether a library links no CUDA library; its size and that of the kernels in it
#
# Registers and spills are ptxas' words. Threads and bytes of shared memory are the most that any launch asked for, from
# target/cuda-emulator/launches.tsv, which the emulator writes as MOH_EMULATOR_LOG. Instructions are counted in the disassembly; the text that
# --write puts above the table says what each is. Needs ci/cuda-toolchain.sh's tools, and python3.
set -euo pipefail
cd "$(dirname "$0")/.."

latest() { # the newest build's file of that name
    find "${CARGO_TARGET_DIR:-target}/release/build" -path "*/moh-cuda-*/out/$1" -printf '%T@ %p\n' 2>/dev/null |
        sort -nr | sed -n '1s/^[^ ]* //p'
}
resources=$(latest resources.tsv)
if [ -z "$resources" ]; then
    echo "cuda-report: no build: cargo build --release -p moh-cuda --features kernels" >&2
    exit 1
fi
images=$(dirname "$resources")
document=docs/cuda-resources.md
launches=$PWD/target/cuda-emulator/launches.tsv

check() {
    if ldd "$1" | grep -iE 'libcuda|libcublas|libnv'; then
        echo "cuda-report: $1 links a CUDA library" >&2
        exit 1
    fi
    if nm -D --undefined-only "$1" | grep -E ' cu[A-Z]'; then
        echo "cuda-report: $1 needs a function of CUDA" >&2
        exit 1
    fi
    kernels=$(cat "$images"/*.fatbin | wc -c)
    echo "$1: $(stat -Lc %s "$1") bytes, of which $kernels are CUDA kernels; links no CUDA library"
}

table() {
    tools=$(dirname "$(ci/cuda-toolchain.sh)")
    counts=$(mktemp)
    trap 'rm -f "$counts"' EXIT
    for image in "$images"/*.fatbin; do
        # The modules of the last build: images of files that are gone stay behind.
        grep -q "^$(basename "$image" .fatbin)	" "$resources" || continue
        PATH=$tools:$PATH "$tools/cuobjdump" --dump-sass "$image"
    done | awk '
        function flush() {
            if (kernel != "")
                print kernel, target, hg + 0, hm + 0, tma + 0, multicast + 0, ldgsts + 0, ldg + 0, lds + 0, sts + 0, local_memory + 0, waits + 0, starts + 0
        }
        BEGIN { OFS = "\t" }
        /arch = sm_/ { flush(); kernel = ""; target = $NF }
        /Function : / { flush(); kernel = $NF; hg = hm = tma = multicast = ldgsts = ldg = lds = sts = local_memory = waits = starts = 0 }
        / HGMMA/ { hg++ } / HMMA/ { hm++ } / UTMALDG/ { tma++ } / UTMALDG[^ ]*MULTICAST/ { multicast++ } / LDGSTS/ { ldgsts++ }
        / LDG[. ]/ { ldg++ } / LDSM?[. ]/ { lds++ } / STSM?[. ]/ { sts++ } / (LDL|STL)/ { local_memory++ }
        / ACQBULK/ { waits++ } / PREEXIT/ { starts++ }
        END { flush() }' >"$counts"
    if [ -f "$launches" ]; then set -- "$launches"; else set --; fi
    python3 ci/cuda_resources.py table "$resources" "$counts" "$@"
}

launch_table() {
    cargo build --release --locked --quiet -p moh-cuda --features kernels --example moh_cuda
    MOH_CUDA_DRIVER=$(ci/cuda-emulator.sh) python3 ci/cuda_launches.py "${CARGO_TARGET_DIR:-target}/release/examples/libmoh_cuda.so"
}

write() {
    MOH_CUDA_DRIVER=$(ci/cuda-emulator.sh)
    export MOH_CUDA_DRIVER MOH_EMULATOR_LOG=$launches
    rm -f "$launches"
    cargo test --release --locked --quiet -p moh-cuda --features kernels --test it
    sort -u "$launches" -o "$launches"
    cat >"$document" <<'TEXT'
# Resources of the CUDA kernels

Written by `ci/cuda-report.sh --write`, with nvcc 13.0.88; `ci/cuda-report.sh --drift` compares it with the latest build. Nothing here is measured on a GPU.

- Registers a thread, and spilled bytes, are ptxas' counts.
- Shared memory is the largest number of bytes that a launch of the tests asked for.
- Instructions are counted in the kernel's code, also those outside of loops: `HGMMA` is wgmma, `HMMA` mma.sync, `UTMALDG` a TMA load (of these
  with multicast to a cluster: `multicast`), `LDGSTS` cp.async, `LDG` a load from global memory, `LDS` and `STS` shared memory (with ldmatrix and
  stmatrix), `LDL, STL` local memory. `PDL`: how often the kernel waits for the one before it (`ACQBULK`) and lets the next one start (`PREEXIT`).
- Where targets differ: sm_80 / sm_90. Kernels of `*_sm90.cu` are only for sm_90a. Their threads start with 168 registers (128 with 512 threads); producers then release
  registers to consumers.
- A `bf16` kernel with the same counts as its `f16` kernel is left out.
TEXT
    launch_table >>"$document"
    table >>"$document"
}

case ${1:-} in
'') table ;;
--write) write ;;
--launches) launch_table ;;
--drift) python3 ci/cuda_resources.py drift "$resources" "$document" ;;
--check) check "${2:?usage: ci/cuda-report.sh --check LIBRARY}" ;;
*)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | sed '$d' >&2
    exit 2
    ;;
esac
