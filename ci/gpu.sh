#!/usr/bin/env bash
# Everything that needs a GPU, in stages: correctness, speed against dense peers, profiles, whole models in onnxruntime.
#
# usage: ci/gpu.sh --pack [--onnxruntime] [--wheel FILE]
#            on a machine with Rust: builds what the GPU machine runs into target/gpu/1, target/gpu/2, ...: what each call carries.
#            It prints sizes and the calls. A wheel is unpacked there into the Python path: FlashAttention-3, for instance
#        ci/gpu.sh --keep
#            on the GPU machine: puts the pieces in target/gpu aside, in MOH_GPU_HOME
#        ci/gpu.sh [--out DIR] [--only PREFIX] [--seconds N] STAGE ...
#            on the GPU machine, which needs no network: runs stages, or the parts whose names start with PREFIX
#        ci/gpu.sh --dry-run [--out DIR] [STAGE ...]
#            without a GPU: the same on the emulator, and faults planted into it (stage `faults`). Its times mean nothing
#
# stage  minutes
#   A       5    plan, router, attention before and on Hopper, products, dense layers with and without cuBLASLt, norms, caches, quantised
#                weights; again with 4 multiprocessors; memcheck
#   B       8    kernels against dense peers, the rows that matter most
#   C       7    ncu on one call of each of six kernels
#   D       9    all rows; tests of CUDA graphs; tests with a second seed
#   E       9    whole models in onnxruntime, and decoding with int4 weights and a cache in place
#   F       9    compute-sanitizer's other tools
#   G      10    tests of models' sizes
#
# Each part is a process of its own with its own time limit. DIR gets three files a stage: STAGE.jsonl, written after each row;
# STAGE.md, its tables; STAGE-logs.tar.gz. The exit status is 1 if one of our kernels failed. A part whose tool is missing is left out.
# The GPU machine needs a driver for CUDA 13 and Python with lzma; for stages B to D, PyTorch for CUDA 13 and numpy; for E, onnx as well.
# Where there is no GPU it says so and succeeds.
#
# MOH_GPU_HOME       pieces, unpacked programs, models   (/tmp/moh-gpu)
# MOH_GPU_OUT        results, without --out              (target/gpu-results)
# MOH_GPU_TRANSFER   bytes that a call can carry, with the source tree    (67108864)
# MOH_REQUIRE_CUDA   1: no GPU is a failure
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
pieces=$root/target/gpu
built=${CARGO_TARGET_DIR:-$root/target}/release
home=${MOH_GPU_HOME:-/tmp/moh-gpu}
logs=${MOH_GPU_LOGS:-$home/logs}
device=${MOH_GPU_DEVICE:-cuda}
out=${MOH_GPU_OUT:-$root/target/gpu-results}
transfer=${MOH_GPU_TRANSFER:-67108864}
python=python3
only=
seconds=
dry=0
together=0
failed=()

usage() { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | sed '$d'; }
fail() {
    echo "gpu: $*" >&2
    exit 2
}

# ---------------------------------------------------------------------------------------------------------------- pack

# add NAME FILE: adds a program or library without its symbols.
add() {
    cp "$2" "$stage_folder/$1"
    strip --strip-unneeded "$stage_folder/$1"
}

# The kernels' library and the test program, built and added to $stage_folder. Cargo names test programs by a hash: it says which one.
add_kernels() {
    cargo build --release --locked -p moh-cuda --features kernels --example moh_cuda
    program=$(cargo test --release --locked -p moh-cuda --features kernels --test it --no-run --message-format=json |
        python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("executable") and message["target"]["name"] == "it":
        print(message["executable"])')
    add libmoh_cuda.so "$built/examples/libmoh_cuda.so"
    add test-cuda "$program"
    cp models/src/presets/moh-*.json "$stage_folder/"
}

pack_all() {
    wheel=
    onnxruntime=0
    while [ $# -gt 0 ]; do
        case $1 in
        --onnxruntime) onnxruntime=1 ;;
        --wheel)
            [ -f "${2:-}" ] || fail "--wheel needs a file"
            wheel=$2
            shift
            ;;
        *) fail "--pack does not know $1" ;;
        esac
        shift
    done
    ci/cuda-toolchain.sh >/dev/null
    mkdir -p "$pieces"
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    stage_folder=$scratch/programs
    mkdir "$stage_folder"
    # The workspace as ci/test.sh builds it, so that nothing is compiled twice; then what has kernels.
    cargo build --release --locked --workspace
    cargo build --release --locked -p moh-ops --features cuda
    add moh-export "$built/moh-export"
    add libmoh_ops.so "$built/libmoh_ops.so"
    add_kernels
    rm -rf "${pieces:?}"/*
    python3 ci/gpu/archive.py pack "$stage_folder" "$pieces/moh-gpu"
    if [ -n "$wheel" ]; then
        mkdir "$scratch/wheel"
        python3 -m zipfile -e "$wheel" "$scratch/wheel"
        python3 ci/gpu/archive.py pack "$scratch/wheel" "$pieces/wheel"
    fi
    if [ $onnxruntime = 1 ]; then pack_onnxruntime; fi
    python3 ci/gpu/calls.py "$pieces" "$transfer"
}

# onnxruntime's Python package with the CUDA provider, cut down to the code for Hopper.
pack_onnxruntime() {
    mkdir "$scratch/ort"
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --implementation cp --python-version 3.12 --abi cp312 \
        --dest "$scratch/ort" onnxruntime-gpu==1.31.1
    python3 -m zipfile -e "$scratch"/ort/onnxruntime_gpu-*.whl "$scratch/ort/wheel"
    rm "$scratch"/ort/onnxruntime_gpu-*.whl
    capi=$scratch/ort/wheel/onnxruntime/capi
    python3 ci/gpu/keep_arch.py "$capi/libonnxruntime_providers_cuda.so" 90
    # The Python module holds the runtime; libonnxruntime.so is for C and Rust programs.
    rm -rf "$capi"/libonnxruntime_providers_tensorrt.so "$capi"/libonnxruntime.so* "$scratch"/ort/wheel/onnxruntime_gpu-*
    python3 ci/gpu/archive.py pack "$scratch/ort/wheel" "$pieces/ort"
}

# ------------------------------------------------------------------------------------------------- on the GPU machine

# Of several packs, whose pieces may come in several calls, the one with the newest piece counts; pieces of others are removed.
keep() {
    local name newest piece
    mkdir -p "$home"
    find "$pieces" -name '*.[0-9][0-9]' -exec cp -p {} "$home/" \; 2>/dev/null || true
    for name in moh-gpu wheel ort; do
        newest=$(ls -t "$home/$name".*.[0-9][0-9] 2>/dev/null | sed -n 1p) || true
        for piece in "$home/$name".*.[0-9][0-9]; do
            [[ ! -f $piece || $piece == "${newest%.*.*}".* ]] || rm "$piece"
        done
    done
    ls -l "$home"
}

# unpack_into FOLDER NAME: once all pieces NAME.ID.N.00, NAME.ID.N.01, ... are here, unless the same ones have been unpacked. What another
# pack has left goes away, with the models that its programs have made. ID is a checksum.
unpack_into() {
    local parts=("$home/$2".*.[0-9][0-9]) id total
    [ -f "${parts[0]}" ] || return 0
    id=${parts[0]#"$home/$2."}
    total=${id#*.}
    id=${id%%.*}
    [ "$(cat "$home/$2.unpacked" 2>/dev/null)" != "$id" ] || return 0
    rm -rf "$1" "$home/$2.unpacked" "$home/models"
    [ "${#parts[@]}" = "${total%.*}" ] || return 0
    [[ $(cat "${parts[@]}" | sha256sum) == "$id"* ]] || fail "the pieces of $2 in $home are damaged: carry them again"
    mkdir -p "$1"
    "$python" ci/gpu/archive.py unpack "$1" "${parts[@]}"
    echo "$id" >"$home/$2.unpacked"
}

unpack() {
    keep >/dev/null
    unpack_into "$home/bin" moh-gpu
    [ -f "$home/moh-gpu.unpacked" ] || fail "$home lacks pieces of moh-gpu: run ci/gpu.sh --pack on a machine with Rust, and carry target/gpu/1 here"
    # First on Python's path: the machine may have an onnxruntime without CUDA.
    unpack_into "$home/python-wheel" wheel
    unpack_into "$home/python-ort" ort
}

# The folders of CUDA's libraries in Python's packages, which onnxruntime looks for among the system's.
cuda_folders() {
    "$python" - <<'PYTHON'
import glob, os, site, sys
roots = site.getsitepackages() + [p for p in sys.path if p.endswith("site-packages")]
found = {os.path.dirname(f) for r in roots for f in glob.glob(os.path.join(r, "nvidia", "**", "lib", "*.so*"), recursive=True)}
print(":".join(sorted(found)))
PYTHON
}

# begin STAGE SECONDS: the results of a stage start anew.
begin() {
    stage=$1
    deadline=$((SECONDS + ${seconds:-$2}))
    logs=$home/logs/$stage
    # For the functions that run in processes of their own.
    export MOH_GPU_HOME=$home MOH_GPU_LOGS=$logs MOH_GPU_DEVICE=$device
    rows=$out/$stage.jsonl
    rm -rf "$logs" "$rows"
    mkdir -p "$logs" "$out"
    : >"$rows"
    printf '\n== stage %s\n' "$stage"
}

# record PART OUTCOME SECONDS NOTE
record() {
    local line="\"record\": \"part\", \"stage\": \"$stage\", \"part\": \"$1\", \"outcome\": \"$2\", \"seconds\": $3, \"note\": \"$4\""
    [ "$dry" = 0 ] || line="$line, \"dry\": true"
    printf '{%s}\n' "$line" >>"$rows"
    printf '%-40s %-8s %4s s  %s\n' "$1" "$2" "$3" "$4"
}

# selected PART: whether --only asks for it.
selected() { [[ $1 == "$only"* ]]; }

# part NAME LIMIT COMMAND...: runs a part in its time, and goes on where it fails. Exit status 77: its tool is missing. Parts of a stage
# that times nothing run at the same time.
part() {
    if [ "$together" = 1 ]; then run_part "$@" & else run_part "$@"; fi
}

run_part() {
    local name=$1 limit=$2 start=$SECONDS code=0 outcome note
    shift 2
    selected "$name" || return 0
    local left=$((deadline - SECONDS))
    if [ "$left" -lt 5 ]; then
        record "$name" "left out" 0 "the stage's time is over"
        return 0
    fi
    [ "$limit" -le "$left" ] || limit=$left
    timeout -k 5 "$limit" "$@" >"$logs/$name.log" 2>&1 </dev/null || code=$?
    case $code in
    0) outcome=passed note= ;;
    77) outcome="left out" note=$(tail -n 1 "$logs/$name.log" | tr -dc 'A-Za-z0-9 .,:;()_/=-') ;;
    124 | 137) outcome=killed note="after $limit s" ;;
    *) outcome=FAILED note="exit status $code" ;;
    esac
    record "$name" "$outcome" $((SECONDS - start)) "$note"
    case $outcome in
    FAILED | killed)
        { grep -m 4 -E 'FAILED|WRONG|panicked|error:|Error:' "$logs/$name.log" || true && tail -n 3 "$logs/$name.log"; } | cut -c 1-300 | sed 's/^/    /'
        ;;
    esac
    # After each part: a call that is stopped keeps its logs.
    "$python" ci/gpu/archive.py logs "$logs" "$out/$stage-logs.tar.gz"
}

finish() {
    wait
    together=0
    # Of parts that ran at the same time, an earlier archive may have come last.
    "$python" ci/gpu/archive.py logs "$logs" "$out/$stage-logs.tar.gz"
    "$python" ci/gpu/report.py "$out" "$stage" || failed+=("$stage")
}

# test_program FILTER...: the tests of that name; it is a failure if there are none.
test_program() {
    # Each part runs in a process of its own.
    local output=$home/tests.$$
    "$home/bin/test-cuda" "$@" --test-threads=1 2>&1 | tee "$output"
    grep -q 'test result: ok\. [1-9]' "$output" || {
        echo "gpu: no test is named $*"
        return 1
    }
}

# with_cublaslt FILTER...: the same with the library that Python's packages have.
with_cublaslt() {
    local folder found folders=${LD_LIBRARY_PATH:-}
    for folder in ${folders//:/ }; do
        for found in "$folder"/libcublasLt.so.*; do
            if [ -f "$found" ]; then
                MOH_CUDA_CUBLASLT=$found test_program "$@"
                return
            fi
        done
    done
    [ "$device" = emulator ] || {
        echo "no libcublasLt"
        return 77
    }
    MOH_CUDA_CUBLASLT=$MOH_CUDA_DRIVER test_program "$@"
}

# sanitize TOOL FILTER...: the tests under compute-sanitizer. What the tool prints decides: where it stops a kernel the test fails, and the exit
# status is the test's.
sanitize() {
    command -v compute-sanitizer >/dev/null || {
        echo "no compute-sanitizer"
        return 77
    }
    local found=0 output=$home/sanitize.$$ tool=$1 filter=("${@:2}" --skip rerun --skip model_sizes)
    [ "$device" = emulator ] || export MOH_REQUIRE_CUDA=1
    compute-sanitizer --tool "$tool" --error-exitcode 99 "$home/bin/test-cuda" "${filter[@]}" --test-threads=1 2>&1 | tee "$output" || found=$?
    if grep -qE '(ERROR|RACECHECK) SUMMARY: [1-9]|^========= (Error: |Warning: )?(Invalid|Barrier|Race|Uninit)' "$output"; then
        echo "gpu: $tool has found errors"
        return 1
    fi
    if ! grep -qE '(ERROR|RACECHECK) SUMMARY' "$output"; then
        test_program "${filter[@]}" || return 1
        echo "compute-sanitizer does not work here (exit status $found)"
        return 77
    fi
    [ "$found" = 0 ] || return "$found"
    grep -q 'test result: ok\. [1-9]' "$output" || {
        echo "gpu: no test is named ${filter[*]}"
        return 1
    }
}

# profile CASE: ncu's pages of one call; profiles are too large to bring back whole.
profile() {
    local report=$home/$1 kernels command
    kernels=("$python" ci/gpu/kernels.py "$home/bin/libmoh_cuda.so" /dev/null --device "$device" --profile "$1")
    command=(ncu --set full --clock-control none --profile-from-start off --kernel-name 'regex:^moh_' --force-overwrite --export "$report" "${kernels[@]}")
    echo "${command[*]}"
    if [ "$device" = emulator ]; then "${kernels[@]}" || return 1; fi
    command -v ncu >/dev/null || {
        echo "no ncu"
        return 77
    }
    "${command[@]}" >"$logs/$1.ncu" 2>&1 || { # ours fails without ncu as well, or ncu cannot work here
        cat "$logs/$1.ncu"
        "${kernels[@]}" || return 1
        echo "ncu fails here: $(grep -m 1 -E '==(ERROR|WARNING)==' "$logs/$1.ncu")"
        return 77
    }
    cat "$logs/$1.ncu"
    ncu --import "$report.ncu-rep" --page details >"$logs/$1.details.txt"
    ncu --import "$report.ncu-rep" --page raw --csv >"$logs/$1.raw.csv"
    ncu --import "$report.ncu-rep" --page source --csv >"$logs/$1.source.csv" 2>/dev/null || true
}

# tests NAME LIMIT [VARIABLE=VALUE ...] -- FILTER...
tests() {
    local name=$1 limit=$2 variables=()
    shift 2
    while [ "$1" != -- ]; do
        variables+=("$1")
        shift
    done
    shift
    part "$name" "$limit" env MOH_REQUIRE_CUDA="$required" "${variables[@]}" "$root/ci/gpu.sh" --run test_program "$@"
}

# kernels PART NAME LIMIT [OPTION ...]: rows. No row starts in the last ten seconds.
kernels() {
    local kind=$1 name=$2 limit=$3 left=$((deadline - SECONDS))
    shift 3
    [ "$limit" -le "$left" ] || limit=$left
    part "$name" "$limit" "$python" ci/gpu/kernels.py "$home/bin/libmoh_cuda.so" "$rows" "$kind" --stage "$stage" --name "$name" \
        --device "$device" --seconds $((limit - 10)) "$@"
}

# -------------------------------------------------------------------------------------------------------------- stages

stage_A() {
    begin A 300
    if [ "$dry" = 0 ]; then together=1; fi
    local attention=(routed_attention:: --skip rerun --skip random_calls --skip model_sizes) products=(head_linear::widths_of_tiles head_linear::large_tiles)
    local caches=(cache_update:: routed_cached_attention:: --skip rerun --skip random_calls --skip model_sizes)
    local dense=(--skip head_linear --skip rerun --skip model_sizes)
    local quantised=(nbits:: --skip rerun --skip random_calls --skip model_sizes)
    if [ "$dry" = 1 ]; then
        attention=(routed_attention::long_sequences_in_tiles) products=(head_linear::large_tiles)
        caches=(cache_update:: routed_cached_attention::captured) quantised=(nbits::captured nbits::mixtures)
    fi
    tests plan 60 -- plan::
    tests router 60 -- top_k_router::
    # Beside what follows, this tells a fault of kernels from one of kernels that start early.
    tests plain-launches 60 MOH_CUDA_DEPENDENT_LAUNCH=0 -- routed_attention::long_sequences_in_tiles head_linear::large_tiles
    tests attention-80 120 MOH_CUDA_CAPABILITY=80 -- "${attention[@]}"
    tests attention-hopper 120 -- "${attention[@]}"
    tests products-widths 60 -- head_linear::widths_of_tiles
    tests products-tiles 60 -- head_linear::large_tiles
    tests norms 60 -- layer_norm:: depthwise_conv::
    tests dense 60 MOH_CUDA_CUBLASLT=0 -- linear:: "${dense[@]}"
    part dense-cublaslt 60 "$root/ci/gpu.sh" --run with_cublaslt linear:: "${dense[@]}"
    tests caches 120 -- "${caches[@]}"
    tests caches-80 120 MOH_CUDA_CAPABILITY=80 -- "${caches[@]}"
    tests quantised 120 -- "${quantised[@]}"
    tests attention-4-multiprocessors 120 MOH_CUDA_MULTIPROCESSORS=4 -- "${attention[@]}"
    tests products-4-multiprocessors 60 MOH_CUDA_MULTIPROCESSORS=4 -- "${products[@]}"
    part memcheck-attention 60 "$root/ci/gpu.sh" --run sanitize memcheck routed_attention::long_sequences_in_tiles
    part memcheck-products 60 "$root/ci/gpu.sh" --run sanitize memcheck head_linear::widths_of_tiles
    part memcheck-caches 60 "$root/ci/gpu.sh" --run sanitize memcheck routed_cached_attention::unusual_positions
    part memcheck-quantised 60 "$root/ci/gpu.sh" --run sanitize memcheck nbits::all_widths
    finish
}

stage_B() {
    begin B 480
    kernels attention-64 attention-64 120 --quick
    kernels attention-128 attention-128 90 --quick
    kernels decode decode 70 --quick
    kernels linear linear 80 --quick
    kernels cached cached 60 --quick
    kernels nbits nbits 60 --quick
    kernels attention-72 attention-72 60 --quick
    kernels attention-variants attention-variants 60 --quick
    kernels experts experts 60 --quick
    finish
}

stage_C() {
    local one
    begin C 430
    for one in attention-64 attention-128 attention-72 projection combination combination-int4; do
        part "ncu-$one" 72 "$root/ci/gpu.sh" --run profile "$one"
    done
    finish
}

stage_D() {
    begin D 540
    local module kind type modules=(plan top_k_router routed_attention linear routed_mlp aggregated_attention nbits cache_update routed_cached_attention every_operator) types=(f16 bf16)
    # "linear::" is a part of "head_linear::", too. Stage B's dry run has the rows in float16.
    if [ "$dry" = 1 ]; then modules=(top_k_router every_operator) types=(bf16); fi
    tests graphs 60 -- graph:: --skip rerun
    for module in "${modules[@]}"; do
        tests "seed-2-$module" 90 MOH_SEED=2 -- "$module::" --skip rerun --skip model_sizes
    done
    for type in "${types[@]}"; do
        for kind in attention-64 attention-128 decode linear cached nbits attention-72 attention-variants; do
            kernels "$kind" "$kind-$type" 100 --type "$type" --seed 2
        done
    done
    kernels experts experts 80 --seed 2
    finish
}

stage_E() {
    local model
    begin E 540
    for model in dit dit-routed llama llama-routed llama-int4 llama-int4-long llama-int4-prompt; do
        if [ ! -x "$home/bin/moh-export" ] || [ ! -f "$home/bin/libmoh_ops.so" ]; then
            ! selected "$model" || record "$model" "left out" 0 "no moh-export or libmoh_ops.so: ci/gpu.sh --pack builds them"
            continue
        fi
        part "$model" 200 "$python" ci/gpu/models.py "$home/bin/moh-export" "$home/bin/libmoh_ops.so" "$home/bin" "$home/models" "$rows" \
            "$model" --stage E --name "$model" "${models[@]}"
    done
    finish
}

stage_F() {
    local tool module
    begin F 540
    # Without "linear", which is a part of "head_linear".
    local modules=(plan head_linear routed_attention routed_mlp aggregated_attention top_k_router nbits cache_update routed_cached_attention)
    modules+=(layer_norm depthwise_conv)
    for tool in memcheck racecheck synccheck initcheck; do
        for module in "${modules[@]}"; do
            part "$tool-$module" 90 "$root/ci/gpu.sh" --run sanitize "$tool" "$module::"
        done
        part "$tool-linear" 90 "$root/ci/gpu.sh" --run sanitize "$tool" linear:: --skip head_linear
    done
    finish
}

stage_G() {
    local module
    begin G 600
    if [ "$dry" = 0 ]; then together=1; fi
    # Their references take minutes on a CPU. Exact names: "linear::" is a part of "head_linear::".
    for module in head_linear linear routed_mlp nbits routed_cached_attention; do
        tests "sizes-$module" 590 -- --exact "$module::model_sizes_on_a_gpu"
    done
    finish
}

# ------------------------------------------------------------------------------------------------------------- dry run

# expect WHAT COMMAND...
expect() {
    local what=$1
    shift
    if "$@"; then
        printf '%-88s as expected\n' "$what"
    else
        printf '%-88s WRONG\n' "$what"
        failed+=("faults: $what")
    fi
}

count() { grep -c "$1" "$rows" || true; }

stage_faults() {
    local kind limit code
    for kind in error lost wrong hang crash; do
        if [ "$kind" = hang ]; then limit=15; else limit=60; fi
        begin "fault-$kind" 90
        # The sixth launch is in the second row.
        export MOH_GPU_FAULT=$kind:6
        kernels attention-64 faulty "$limit" --quick
        unset MOH_GPU_FAULT
        kernels decode after 60 --quick
        code=0
        "$python" ci/gpu/report.py "$out" "$stage" >"$logs/report" || code=$?
        expect "$kind: the stage fails" [ "$code" = 1 ]
        expect "$kind: the row before it is kept" [ "$(count '"part": "faulty".*"status": "dry run"')" -ge 1 ]
        expect "$kind: the next part runs" [ "$(count '"part": "after", "outcome": "passed"')" = 1 ]
        # Of part `faulty`, "lost" has two rows and one record of what was left out.
        case $kind in
        hang) expect "hang: killed in its time" [ "$(count '"part": "faulty", "outcome": "killed", "seconds": 1[0-9],')" = 1 ] ;;
        error) expect "error: the row has the library's message" [ "$(count '"status": "FAILED".*there is no operator')" = 1 ] ;;
        lost) expect "lost: no further row runs" [ "$(count 'after a failure of the GPU')-$(count '"part": "faulty", "name"')" = 1-2 ] ;;
        wrong) expect "wrong: the row says so" [ "$(count '"status": "WRONG"')" = 1 ] ;;
        crash) expect "crash: the part fails" [ "$(count '"part": "faulty", "outcome": "FAILED"')" = 1 ] ;;
        esac
    done
    begin fault-name 60
    tests nothing 30 -- no_test_has_this_name
    expect "a filter that matches no test is a failure" [ "$(count '"part": "nothing", "outcome": "FAILED"')" = 1 ]
    expect "ratios and distances are judged, targets summed up, and nothing run is a failure" "$python" ci/gpu/report_test.py
    expect "sanitizers' findings are failures, and a new pack replaces an old one" ci/gpu/shell_test.sh
}

# What a dry run needs: the kernels, the emulator, numpy, onnx and onnxruntime; without cargo, what a pack has left in MOH_GPU_HOME.
prepare_dry_run() {
    dry=1
    home=$root/target/gpu-dry-run
    [ "$out" != "$root/target/gpu-results" ] || out=$home/results
    MOH_CUDA_DRIVER=$(ci/cuda-emulator.sh)
    export MOH_CUDA_DRIVER
    device=emulator
    packages=$root/target/gpu-python
    if ! PYTHONPATH=$packages "$python" -c 'import ml_dtypes, numpy, onnx, onnxruntime' 2>/dev/null; then
        "$python" -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --only-binary=:all: --upgrade \
            --target "$packages" numpy ml_dtypes onnx onnxruntime==1.31.1
    fi
    rm -rf "$home"
    pieces=$home/pieces
    stage_folder=$home/stage
    mkdir -p "$pieces" "$stage_folder"
    add_kernels
    for program in moh-export libmoh_ops.so; do
        [ ! -f "$built/$program" ] || cp "$built/$program" "$stage_folder/"
    done
    "$python" ci/gpu/archive.py pack "$stage_folder" "$pieces/moh-gpu"
    unpack
    PYTHONPATH=$packages
    export PYTHONPATH
}

main() {
    [ $# -gt 0 ] || fail "names no stage: $0 --help"
    if [ "$dry" = 1 ]; then
        prepare_dry_run
        required=0
        models=(--small --provider CPUExecutionProvider)
    else
        if ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
            echo "gpu: there is no GPU here: nothing was run"
            [ "${MOH_REQUIRE_CUDA:-0}" != 1 ]
            exit
        fi
        unpack
        required=1
        models=()
        LD_LIBRARY_PATH=$(cuda_folders)${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
        PYTHONPATH=$home/python-ort:$home/python-wheel${PYTHONPATH:+:$PYTHONPATH}
        export LD_LIBRARY_PATH PYTHONPATH
    fi
    mkdir -p "$out"
    export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
    for one in "$@"; do
        case $one in
        A | B | C | D | E | F | G | faults) "stage_$one" ;;
        *) fail "there is no stage $one: $0 --help" ;;
        esac
    done
    if [ ${#failed[@]} -gt 0 ]; then
        printf '\nFAILED: %s; results are in %s\n' "${failed[*]}" "$out"
        exit 1
    fi
    printf '\nall stages passed; results are in %s\n' "$out"
}

case ${1:-} in
--pack)
    shift
    pack_all "$@"
    exit
    ;;
--keep)
    keep
    exit
    ;;
--run) # a function, in a process with a time limit
    shift
    "$@"
    exit
    ;;
esac
stages=()
while [ $# -gt 0 ]; do
    case $1 in
    --out | --only | --seconds)
        [ $# -gt 1 ] || fail "$1 needs a value"
        declare "${1#--}=$2"
        shift
        ;;
    --dry-run) dry=1 ;;
    -h | --help)
        usage
        exit
        ;;
    -*) fail "there is no option $1" ;;
    *) stages+=("$1") ;;
    esac
    shift
done
if [ "$dry" = 1 ] && [ ${#stages[@]} = 0 ]; then stages=(A B C D E faults); fi
main "${stages[@]}"
