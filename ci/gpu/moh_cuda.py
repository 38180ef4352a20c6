"""The CUDA kernels of ai.moh on PyTorch's tensors, through libmoh_cuda.so (custom-ops/cuda/examples/moh_cuda.rs)."""

import ctypes
import os

import torch

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class MohTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64), ("dtype", ctypes.c_int), ("rank", ctypes.c_int), ("dims", ctypes.c_uint64 * 8)]

    def __init__(self, tensor=None):
        if tensor is None:
            super().__init__(0, 0, -1)
            return
        assert tensor.is_contiguous(), "tensors are contiguous"
        dims = (ctypes.c_uint64 * 8)(*tensor.shape)
        super().__init__(tensor.data_ptr(), TYPES[tensor.dtype], tensor.dim(), dims)


class Kernels:
    """The library, and a workspace on the GPU that calls share: use one stream."""

    def __init__(self, path, device="cuda"):
        self.run = ctypes.CDLL(os.path.abspath(path)).moh_cuda_run
        self.run.restype = ctypes.c_int64
        self.device = device
        self.workspace = torch.empty(256 << 20 if device == "cuda" else 4 << 20, dtype=torch.uint8, device=device)

    def call(self, operator, attributes, inputs, output):
        """A function that puts the call on PyTorch's current stream; tensors stay as they are."""
        text = " ".join(f"{name}={value}" for name, value in attributes.items()).encode()
        array = (MohTensor * len(inputs))(*[MohTensor(tensor) for tensor in inputs])
        described = MohTensor(output)
        error = ctypes.create_string_buffer(1000)
        start = self.workspace.data_ptr()
        start += -start % 256
        room = self.workspace.numel() - 256

        def run(keep=(inputs, output)):
            stream = torch.cuda.current_stream().cuda_stream if self.device == "cuda" else 0
            used = self.run(
                operator.encode(), text, array, ctypes.c_size_t(len(inputs)), ctypes.byref(described),
                ctypes.c_void_p(stream), ctypes.c_uint64(start), ctypes.c_size_t(room), error, ctypes.c_size_t(len(error)),
            )
            if used < 0:
                raise RuntimeError(error.value.decode())

        return run
