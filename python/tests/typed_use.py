"""Uses all of the package's types; mypy and pyright read it, nothing runs it."""

from pathlib import Path
from typing import Any, Dict

import onnxruntime  # type: ignore[import-untyped]

import moh_onnx

library: str = moh_onnx.get_library_path()
version: str = moh_onnx.__version__
options: onnxruntime.SessionOptions = moh_onnx.session_options()
session: onnxruntime.InferenceSession = moh_onnx.InferenceSession(Path("model.onnx"), options, providers=["CPUExecutionProvider"])
try:
    report: Dict[str, Any] = moh_onnx.export("checkpoint", Path("model.onnx"), dtype="f16", force=True, ignore_unexpected=["a.*", "b"])
except moh_onnx.ExportError as error:
    status: int = error.returncode

moh_onnx.export("checkpoint", "model.onnx", dtype=object())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
moh_onnx.get_library_path(1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
