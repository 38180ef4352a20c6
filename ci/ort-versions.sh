#!/bin/sh
# Checks libmoh_ops.so in several versions of onnxruntime, from the oldest supported to a recent one.
#
# usage: ci/ort-versions.sh [MODEL.onnx ...]
#
# Each version gets a Python environment. There the library runs small models of single nodes, good ones and bad ones
# (ort_cases.py writes them, ort_check.py runs them), and each MODEL with the library and without. Prints a table;
# exits with 1 if anything failed.
#
# MOH_CACHE          where the environments are kept    (target/ort-versions)
# MOH_ORT_VERSIONS   the versions                       (1.17.3 1.18.0 1.20.1 1.32.0)
# MOH_OPS_LIBRARY    the library                        (a release build, made first)
# PYTHON             an interpreter that all versions have wheels for: 3.10 to 3.12    (python3)
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
cache=${MOH_CACHE:-$root/target/ort-versions}
versions=${MOH_ORT_VERSIONS:-1.17.3 1.18.0 1.20.1 1.32.0}
python=${PYTHON:-python3}

if [ -z "${MOH_OPS_LIBRARY:-}" ]; then
    cargo build --quiet --release --manifest-path "$root/Cargo.toml" -p moh-ops
    MOH_OPS_LIBRARY=${CARGO_TARGET_DIR:-$root/target}/release/libmoh_ops.so
fi

# environment NAME PACKAGE...: makes a Python environment, once; it is complete when its mark is there.
environment() {
    name=$1
    shift
    [ -f "$cache/$name/complete" ] && return
    rm -rf "${cache:?}/$name"
    "$python" -m venv "$cache/$name" || {
        echo "ort-versions: $python cannot make an environment (it needs venv and pip)" >&2
        exit 1
    }
    "$cache/$name/bin/python" -m pip install --quiet --disable-pip-version-check "$@" || {
        echo "ort-versions: pip cannot install $*; $("$python" --version) may be too new or too old" >&2
        exit 1
    }
    touch "$cache/$name/complete"
}

mkdir -p "$cache"
environment cases onnx numpy
"$cache/cases/bin/python" "$root/ci/ort_cases.py" "$cache/cases/models"

results=
for version in $versions; do
    numpy=numpy
    case $version in 1.1[0-8].*) numpy='numpy<2' ;; esac # built against numpy 1
    environment "$version" "onnxruntime==$version" "$numpy"
    result=$cache/$version.tsv
    results="$results $result"
    # A check that fails or kills the process shows in the table.
    "$cache/$version/bin/python" "$root/ci/ort_check.py" "$MOH_OPS_LIBRARY" "$cache/cases/models" "$@" >"$result" || true
done
# shellcheck disable=SC2086 # a list
"$python" "$root/ci/ort_table.py" $results
