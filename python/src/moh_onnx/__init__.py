"""Exports Mixture-of-Head attention models to ONNX, and runs them in onnxruntime with kernels that skip the unused heads.

    import moh_onnx

    report = moh_onnx.export("checkpoint.pth", "out/model.onnx")
    session = moh_onnx.InferenceSession("out/model.onnx")

onnxruntime is imported by the functions that need it only: `export` and `get_library_path` work without.
"""

from ._export import ExportError, export
from ._files import get_library_path
from ._session import InferenceSession, session_options

TYPE_CHECKING = False
if TYPE_CHECKING:
    __version__: str

__all__ = ["ExportError", "InferenceSession", "__version__", "export", "get_library_path", "session_options"]


def __getattr__(name: str) -> str:
    # Looked up on demand: the programs start through this package, and the look-up takes longer than all else here.
    if name == "__version__":
        from importlib.metadata import version

        return version("moh-onnx")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
