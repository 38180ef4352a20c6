#!/usr/bin/env bash
# Installs a wheel of moh-onnx in fresh environments, with old and new versions of Python and onnxruntime, and runs python/tests in each;
# then checks the types with mypy and pyright.
#
# usage: ci/wheel_check.sh WHEEL [PYTHON=ONNXRUNTIME ...]
#
# Default: 3.9=1.18.0 3.9=1.19.2 3.11=1.18.0 3.11=1.20.1 3.11=1.31.1 3.13=1.20.1 3.13=1.31.1. A Python is the one of that version in the
# PATH or, where pyenv has it, pyenv's; one that is not there is left out, with a note. "types" for a pair checks the types only.
#
# Prints a line a pair; exits with 1 if one failed.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONDONTWRITEBYTECODE=1

if [[ $# -eq 0 || ! -f $1 ]]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
wheel=$(realpath "$1")
shift
[[ $# -gt 0 ]] || set -- 3.9=1.18.0 3.9=1.19.2 3.11=1.18.0 3.11=1.20.1 3.11=1.31.1 3.13=1.20.1 3.13=1.31.1 types
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# interpreter VERSION: its path, if it is there.
interpreter() {
    local found
    for found in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
        found=$(command -v "$found") && "$found" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null &&
            echo "$found" && return
    done
    return 1
}
# environment PYTHON PACKAGE...: a fresh one, in $env.
environment() {
    env=$work/env
    rm -rf "$env"
    "$1" -m venv "$env"
    "$env/bin/pip" install --quiet "${@:2}"
}

check() {
    local python=${1%=*} onnxruntime=${1#*=} numpy=numpy
    case $onnxruntime in 1.1[0-8].*) numpy='numpy<2' ;; esac # built against numpy 1
    python=$(interpreter "$python") || { echo "skip $1: no Python ${1%=*} here"; return; }
    environment "$python" "$wheel" "onnxruntime==$onnxruntime" "$numpy" pytest &&
        (cd "$work" && "$env/bin/python" -m pytest --quiet --no-header -p no:cacheprovider "$root/python/tests") &&
        echo "ok   Python ${1%=*}, onnxruntime $onnxruntime"
}

# The sources, strictly, and a program that uses the installed package.
types() {
    environment "$(interpreter 3.13 || interpreter 3.11 || command -v python3)" "$wheel" onnxruntime==1.31.1 mypy==2.4.1 pyright &&
        (cd "$root/python" && "$env/bin/mypy" --no-error-summary --cache-dir "$work/mypy") &&
        "$env/bin/mypy" --no-error-summary --cache-dir "$work/mypy" --strict "$root/python/tests/typed_use.py" &&
        "$env/bin/pyright" --pythonpath "$env/bin/python" "$root/python/tests/typed_use.py" &&
        echo "ok   types"
}

status=0
for pair in "$@"; do
    # Not in a condition, where errors would not end a function: what failed is said by its own exit status.
    case $pair in
    types) types || { echo "FAIL types" && status=1; } ;;
    *=*) check "$pair" || { echo "FAIL Python ${pair%=*}, onnxruntime ${pair#*=}" && status=1; } ;;
    *) echo "wheel_check: expected PYTHON=ONNXRUNTIME or types, found $pair" >&2 && exit 2 ;;
    esac
done
exit $status
