#!/bin/sh
# Runs README.md and docs/recipes.md, block by block, and the commands of docs/run.md, whose pictures it compares. Each page has a
# scratch folder in target/recipes.
#
# usage: ci/recipes.sh [--torch]
#
# Without --torch, the recipe that needs PyTorch is left out: its packages are several GB. Packages go into a Python
# environment, once. Prints a line a recipe; exits with 1 if one failed.
#
# MOH_BIN           the folder of moh-export and moh-run    (target/release)
# MOH_OPS_LIBRARY   the library                             ($MOH_BIN/libmoh_ops.so)
# ORT_DYLIB_PATH    onnxruntime's library, for C++          (fetched into target/onnxruntime)
# PYTHON            Python 3.11 or newer                    (python3)
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
work=$root/target/recipes
bin=${MOH_BIN:-$(realpath -m "${CARGO_TARGET_DIR:-$root/target}")/release}
ops=${MOH_OPS_LIBRARY:-$bin/libmoh_ops.so}
python=${PYTHON:-python3}
export PIP_DISABLE_PIP_VERSION_CHECK=1

fail() {
    echo "recipes: $*" >&2
    exit 2
}
case ${1:-} in "" | --torch) ;; *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;; esac
for file in "$bin/moh-export" "$bin/moh-run" "$ops"; do
    [ -e "$file" ] || fail "no $file: run 'cargo build --release', or set MOH_BIN and MOH_OPS_LIBRARY"
done
bin=$(realpath "$bin") ops=$(realpath "$ops")
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "needs Python 3.11 or newer, found $("$python" --version): set PYTHON"

mkdir -p "$work"
if [ ! -f "$work/env/complete" ]; then
    rm -rf "$work/env"
    "$python" -m venv "$work/env" || fail "$python cannot make an environment (it needs venv and pip)"
    touch "$work/env/complete"
fi
export PATH="$work/env/bin:$PATH"

# An unpacked release of onnxruntime, for C++. The Python packages have no headers; the package of quark, a quantiser, has those of
# onnxruntime 1.17, and they do for newer libraries.
ORT_HOME=$work/onnxruntime
export ORT_HOME
if [ ! -f "$ORT_HOME/include/onnxruntime_cxx_api.h" ]; then
    rm -rf "$ORT_HOME"
    mkdir -p "$ORT_HOME/wheel"
    python3 -m pip download --quiet --no-deps --only-binary=:all: --dest "$ORT_HOME" amd-quark==0.13 >&2 ||
        fail "pip could not download the package with onnxruntime's headers"
    python3 -m zipfile -e "$ORT_HOME"/amd_quark-*.whl "$ORT_HOME/wheel"
    headers=quark/onnx/operators/custom_ops/include/onnxruntime-1.17.0/onnxruntime/core/session
    mv "$ORT_HOME/wheel/$headers" "$ORT_HOME/include"
    rm -rf "$ORT_HOME/wheel" "$ORT_HOME"/amd_quark-*.whl
fi
mkdir -p "$ORT_HOME/lib"
library=${ORT_DYLIB_PATH:-$("$root/ci/fetch-onnxruntime.sh" "$root/target/onnxruntime")}
for name in libonnxruntime.so libonnxruntime.so.1; do
    ln -sfn "$(realpath "$library")" "$ORT_HOME/lib/$name"
done

# scratch NAME: makes a folder with what a page finds in the repository's root.
scratch() {
    folder=$work/$1
    rm -rf "$folder"
    mkdir -p "$folder/target/release" "$folder/tests"
    for name in docs examples tests/golden; do
        ln -s "$root/$name" "$folder/$name"
    done
    ln -s "$bin/moh-export" "$bin/moh-run" "$folder/target/release/"
    ln -s "$ops" "$folder/target/release/libmoh_ops.so"
    echo "$folder"
}
export MOH_OPS_LIBRARY="$ops" PATH="$bin:$PATH"
python3 -m pip install --quiet onnxruntime==1.31.1 numpy==2.4.6 pillow==13.0.0
# The Python package, of these programs: README.md uses it.
rm -rf "$work/package"
mkdir -p "$work/package"
ln -s "$bin/moh-export" "$bin/moh-run" "$work/package/"
ln -s "$ops" "$work/package/libmoh_ops.so"
python3 -m pip install --quiet --force-reinstall --no-deps "$(MOH_WHEELS=$work/package "$root/ci/wheel.sh" --pack "$work/package")"

status=0
python3 "$root/ci/recipes.py" "$(scratch readme)" "$root/README.md" || status=1
python3 "$root/ci/recipes.py" "$(scratch recipes)" "$root/docs/recipes.md" "$@" || status=1
python3 "$root/ci/commands.py" "$(scratch commands)" "$root/docs/run.md" || status=1
exit $status
