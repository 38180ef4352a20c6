#!/bin/sh
# Fetches the CUDA compiler that the kernels are built with, and prints nvcc's path. No GPU and no driver are needed.
#
# usage: ci/cuda-toolchain.sh [DIR]
#
# DIR is target/cuda without an argument, where custom-ops/cuda/build.rs looks. The compiler comes from NVIDIA's wheels on
# PyPI, under NVIDIA's licence, some 100 MB; what is already in DIR is not fetched again. nvcc itself needs g++.
# CUDA 13.0 on purpose: drivers from 580 on read what it emits.
set -eu

dir=${1:-$(cd "$(dirname "$0")/.." && pwd)/target/cuda}
python=${PYTHON:-python3}
release=13.0.88
nvcc=$dir/nvidia/cu13/bin/nvcc

fail() {
    echo "cuda-toolchain: $*" >&2
    exit 1
}

if [ ! -f "$dir/complete-$release" ]; then
    case $(uname -s)-$(uname -m) in
    Linux-x86_64 | Linux-aarch64) ;;
    *) fail "no wheels with nvcc are known for $(uname -s) on $(uname -m)" ;;
    esac
    "$python" -m pip --version >/dev/null 2>&1 || fail "needs $python with pip; set PYTHON to another interpreter"
    mkdir -p "$(dirname "$dir")"
    # Beside its place, so that the last step is a rename.
    work=$(mktemp -d "$dir.fetch.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    "$python" -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps \
        --only-binary=:all: --target "$work" \
        "nvidia-cuda-nvcc==$release" "nvidia-nvvm==$release" "nvidia-cuda-crt==$release" \
        nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 \
        nvidia-cuda-cuobjdump==13.2.78 nvidia-cuda-nvdisasm==13.2.78 >&2 || fail "pip could not install nvcc $release"
    [ -f "$work/nvidia/cu13/bin/nvcc" ] || fail "the wheels hold no nvidia/cu13/bin/nvcc"
    chmod +x "$work"/nvidia/cu13/bin/* "$work"/nvidia/cu13/nvvm/bin/* 2>/dev/null || true
    touch "$work/complete-$release"
    rm -rf "$dir"
    mv "$work" "$dir"
fi
command -v g++ >/dev/null || fail "nvcc needs g++, which is not in the PATH"
echo "$nvcc"
