"""Sessions of onnxruntime with the kernels registered."""

from __future__ import annotations

import os
import re
import warnings
from typing import TYPE_CHECKING, Any, Optional, Sequence, Union

from ._files import get_library_path

if TYPE_CHECKING:
    import onnxruntime

# The oldest version that the library loads in. Models need 1.18, unless exported with opset=20, ir_version=9.
_OLDEST = (1, 17)


def _onnxruntime() -> Any:
    """The module onnxruntime, if it is there and not too old."""
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        if error.name != "onnxruntime":
            raise
        raise ModuleNotFoundError(
            "moh_onnx needs onnxruntime to run models: pip install onnxruntime, or onnxruntime-gpu", name="onnxruntime"
        ) from None
    found = getattr(onnxruntime, "__version__", "")
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if not numbers:
        # A folder of that name, or what an uninstallation left of the package, can be imported, too.
        raise ImportError(f"{onnxruntime!r}: expected onnxruntime, found a module of that name without a version")
    if (int(numbers[1]), int(numbers[2])) < _OLDEST:
        raise ImportError(f"onnxruntime {found} is too old: moh_onnx needs {_OLDEST[0]}.{_OLDEST[1]} or newer, and most models 1.18")
    return onnxruntime


# What onnxruntime rounds that it multiplies with quantised weights of standard operators: by default activations to 8 bits.
_ACCURACY = "session.qdq_matmulnbits_accuracy_level"


def session_options(options: Optional[onnxruntime.SessionOptions] = None) -> onnxruntime.SessionOptions:
    """`onnxruntime.SessionOptions` with the library of the kernels registered.

    options: registers it in these, and returns them; None: in new ones. To register it again changes nothing.

    Quantised models compute in float32, as `moh-run` and the comparison after an export do, unless the options have an entry
    `session.qdq_matmulnbits_accuracy_level` already: onnxruntime's own choice rounds activations to 8 bits.

    Raises `ImportError` where onnxruntime is absent or older than 1.17.
    """
    if options is None:
        options = _onnxruntime().SessionOptions()
    else:
        _onnxruntime()
    options.register_custom_ops_library(get_library_path())
    try:
        options.get_session_config_entry(_ACCURACY)
    except RuntimeError:
        options.add_session_config_entry(_ACCURACY, "0")
    return options


def InferenceSession(
    path_or_bytes: Union[str, bytes, "os.PathLike[str]"],
    sess_options: Optional[onnxruntime.SessionOptions] = None,
    providers: Optional[Sequence[Any]] = None,
    **kwargs: Any,
) -> onnxruntime.InferenceSession:
    """An `onnxruntime.InferenceSession` that skips the heads that a token does not use.

    path_or_bytes: the exported model.
    sess_options: options of yours; the library is registered in them.
    providers: those of onnxruntime; by default the CPU. The kernels of this package are for the CPU: on another provider their nodes still
        run on the CPU, with copies to and fro, and a warning says so.
    kwargs: what else `onnxruntime.InferenceSession` takes.

    Raises `ImportError` where onnxruntime is absent or older than 1.17, and onnxruntime's own errors.
    """
    ort = _onnxruntime()
    if providers is None:
        providers = ["CPUExecutionProvider"]
    others = [p if isinstance(p, str) else p[0] for p in providers]
    others = [name for name in others if name != "CPUExecutionProvider"]
    if others:
        message = f"{', '.join(others)}: the kernels of moh_onnx are for the CPU, so their inputs and outputs are copied to it and back"
        warnings.warn(message, stacklevel=2)
    path = path_or_bytes if isinstance(path_or_bytes, bytes) else os.fspath(path_or_bytes)
    try:
        session: onnxruntime.InferenceSession = ort.InferenceSession(path, session_options(sess_options), providers=list(providers), **kwargs)
    except Exception as error:
        # onnxruntime names versions of formats only.
        if ort.__version__.startswith("1.17."):
            error.args = (f"{error}\nonnxruntime {ort.__version__} loads models exported with opset=20, ir_version=9; others need 1.18",)
        raise
    return session
