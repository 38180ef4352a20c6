"""The C function of libmoh_cuda.so (custom-ops/cuda/examples/moh_cuda.rs)."""

import ctypes
import os

TYPES = {"f32": 0, "f16": 1, "bf16": 2, "u8": 3, "i64": 4}


class MohTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64), ("dtype", ctypes.c_int), ("rank", ctypes.c_int), ("dims", ctypes.c_uint64 * 8)]


def described(tensor):
    """A tensor for C, from (address, type, shape), or from None for an absent input."""
    if tensor is None:
        return MohTensor(0, 0, -1)
    address, dtype, shape = tensor
    return MohTensor(address, TYPES[dtype], len(shape), (ctypes.c_uint64 * 8)(*shape))


class Kernels:
    """The library."""

    def __init__(self, path):
        self.run = ctypes.CDLL(os.path.abspath(path)).moh_cuda_run
        self.run.restype = ctypes.c_int64
        driver = os.environ.get("MOH_CUDA_DRIVER")
        self.emulator = ctypes.CDLL(driver) if driver else None

    def call(self, operator, attributes, inputs, output, workspace):
        """A function of a stream's address that launches the operator.

        Inputs and output are (address, type, shape); workspace is (address, bytes). Calls share the workspace: use one stream.
        The function raises RuntimeError where the library returns an error.
        """
        text = " ".join(f"{name}={value}" for name, value in attributes.items()).encode()
        array = (MohTensor * len(inputs))(*[described(tensor) for tensor in inputs])
        result = described(output)
        error = ctypes.create_string_buffer(1000)

        def launch(stream):
            used = self.run(
                operator.encode(), text, array, ctypes.c_size_t(len(inputs)), ctypes.byref(result), ctypes.c_void_p(stream),
                ctypes.c_uint64(workspace[0]), ctypes.c_size_t(workspace[1]), error, ctypes.c_size_t(len(error)),
            )
            if used < 0:
                raise RuntimeError(error.value.decode())
            # The emulator runs what is enqueued only when somebody waits, and its memory is read here without a copy.
            if self.emulator and self.emulator.cuCtxSynchronize():
                raise RuntimeError("cuCtxSynchronize")

        return launch
