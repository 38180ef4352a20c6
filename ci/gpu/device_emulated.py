"""The emulator as the device: to try the scripts without a GPU. Tensors are numpy's, peers are written in numpy.

Our kernels run on the emulator (MOH_CUDA_DRIVER). Rows are small, and times mean nothing.

MOH_GPU_FAULT=KIND:N plants a fault into the Nth launch of our kernels: `error` (the library returns an error), `lost` (the same, and
the device works no more), `wrong` (a number of the output is wrong), `hang`, or `crash`.
"""

import os
import time

import ml_dtypes
import numpy as np

TYPES = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16), "u8": np.dtype(np.uint8), "i64": np.dtype(np.int64)}
NAMES = {dtype: name for name, dtype in TYPES.items()}


def aligned(shape, dtype):
    """An array at a multiple of 256 bytes."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.zeros(size + 256, np.uint8)
    start = -memory.ctypes.data % 256
    return memory[start : start + size].view(dtype).reshape(shape)


class Device:
    dry = True
    l2_bytes = 1 << 16

    def __init__(self, kernels):
        self.kernels, self.random, self.launches = kernels, np.random.default_rng(1), 0
        self.workspace = aligned((8 << 20,), np.dtype(np.uint8))
        kind, _, number = os.environ.get("MOH_GPU_FAULT", "").partition(":")
        self.fault, self.fault_at, self.lost = kind, int(number or 0), False

    def seed(self, number):
        self.random = np.random.default_rng(number)

    def machine(self):
        return {"gpu": "none: dry run on the emulator"}

    def warm_up(self):
        pass

    def clock(self):
        return None

    def synchronize(self):
        pass

    def alive(self):
        return not self.lost

    def normal(self, shape, dtype, scale=1.0):
        made = aligned(shape, TYPES[dtype])
        made[...] = (self.random.standard_normal(shape) * scale).astype(TYPES[dtype])
        return made

    def octets(self, shape):
        made = aligned(shape, TYPES["u8"])
        made[...] = self.random.integers(0, 256, shape)
        return made

    def integers(self, numbers):
        made = aligned((len(numbers),), TYPES["i64"])
        made[...] = numbers
        return made

    def gates(self, batch, tokens, heads, share):
        order = self.random.random((batch, tokens, heads)).argsort(-1)
        made = aligned((batch, tokens, heads), TYPES["f32"])
        made[...] = np.where(order < round(share * heads), 0.1 + self.random.random(order.shape), 0)
        return made

    def poisoned(self, shape, dtype):
        made = aligned(shape, TYPES[dtype])
        self.poison(made)
        return made

    def poison(self, tensor):
        tensor[...] = np.nan

    def finite(self, tensor):
        return bool(np.isfinite(tensor.astype(np.float32)).all())

    def float64(self, tensor):
        return np.asarray(tensor, np.float64)

    def bytes(self, tensor):
        return tensor.nbytes

    def swap(self, tensor, first, second):
        return np.swapaxes(tensor, first, second)

    def distance(self, found, expected, factor):
        expected = self.float64(expected) * self.float64(factor)
        return float(np.linalg.norm(self.float64(found) * (self.float64(factor) != 0) - expected) / max(np.linalg.norm(expected), 1e-30))

    def launcher(self, operator, attributes, inputs, output):
        describe = lambda tensor: (tensor.ctypes.data, NAMES[tensor.dtype], tensor.shape)
        workspace = (self.workspace.ctypes.data, self.workspace.nbytes)
        arguments = (attributes, [describe(tensor) for tensor in inputs], describe(output), workspace)
        call = self.kernels.call(operator, *arguments)
        keep = (inputs, output)

        def launch():
            self.launches += 1
            fault = self.fault if self.launches == self.fault_at else ""
            if fault == "hang":
                time.sleep(3600)
            if fault == "crash":
                os.abort()
            self.lost |= fault == "lost"
            (self.kernels.call("NoSuchOperator", *arguments) if fault in ("error", "lost") else call)(0)
            if fault == "wrong":
                keep[1][(0,) * output.ndim] += 100

        return launch

    def times(self, functions, rounds):
        found = {}
        for name, listed in functions.items():
            start = time.perf_counter()
            for function in listed:
                function()
            taken = (time.perf_counter() - start) * 1e3 / len(listed)
            found[name] = {"median": taken, "min": taken, "max": taken}
        return found

    def attention_peers(self, queries, keys, values, causal, bias):
        group = queries.shape[1] // keys.shape[1]

        def dense():
            q, k, v = (self.float64(x) for x in (queries, keys, values))
            scores = q @ np.repeat(k, group, 1).swapaxes(2, 3) * q.shape[-1] ** -0.5
            if bias is not None:
                scores = scores + self.float64(bias)
            if causal:
                scores[..., np.triu(np.ones(scores.shape[-2:], bool), 1 + scores.shape[-1] - scores.shape[-2])] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            return (weights / weights.sum(-1, keepdims=True) @ np.repeat(v, group, 1)).swapaxes(1, 2)

        def missing():
            raise RuntimeError("not in a dry run")

        return {"numpy": dense, "FA3": missing}

    def gathered_attention(self, queries, keys, values, gates):
        return lambda: None

    def matmul(self, x, weight):
        return lambda: self.float64(x) @ self.float64(weight).T

    def mlp(self, x, wide, narrow):
        return lambda: np.maximum(self.float64(x) @ self.float64(wide), 0) @ self.float64(narrow)
