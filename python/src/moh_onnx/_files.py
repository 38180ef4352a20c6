"""Where the package's compiled files are."""

from __future__ import annotations

import os

_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin")


def compiled(name: str) -> str:
    """The path of a compiled file.

    Raises `FileNotFoundError` where the package was not installed from a wheel.
    """
    path = os.path.join(_FOLDER, name)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: not there; install the wheel of moh-onnx, not its sources")
    return path


def get_library_path() -> str:
    """The path of `libmoh_ops.so`, the custom-operator library for onnxruntime.

    It has the CPU kernels of the domain `ai.moh`, for onnxruntime 1.17 and newer. Give it to `register_custom_ops_library` of any
    host: `onnxruntime.SessionOptions`, or the function of that name in C, C++, C# and Java.
    """
    return compiled("libmoh_ops.so")
