"""A GPU through PyTorch: tensors, streams, CUDA graphs, clocks, and the dense peers.

With device "cpu", for tests of this file, kernels run on the emulator and nothing is captured.
"""

import importlib
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "u8": torch.uint8, "i64": torch.int64}
NAMES = {dtype: name for name, dtype in TYPES.items()}
# Where FlashAttention-3 may be: its own package, PyTorch's, and one with the forward pass in bfloat16 only.
FLASH_3 = ["flash_attn_interface", "flash_attn_3.flash_attn_interface", "fa3_fwd_interface"]
WINDOW = 0.01  # seconds that a function runs in each round


def flash_3():
    """FlashAttention-3's module; raises ImportError with the reason of each name."""
    reasons = []
    for name in FLASH_3:
        try:
            return importlib.import_module(name)
        except Exception as error:  # noqa: BLE001, a library that does not load raises OSError
            reasons.append(f"{name}: {error}")
    raise ImportError("; ".join(reasons))


class Device:
    def __init__(self, kernels, device="cuda"):
        self.kernels, self.device, self.gpu, self.last_clock = kernels, device, device == "cuda", None
        self.dry = not self.gpu
        # float32 products are exact references.
        torch.backends.cuda.matmul.allow_tf32 = False
        self.workspace = torch.empty((1 << 30) if self.gpu else (8 << 20), dtype=torch.uint8, device=device)
        self.l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size if self.gpu else 1 << 16
        self.base = 0

    def seed(self, number):
        torch.manual_seed(self.base + number)

    def machine(self):
        """What was measured on, and in which state."""
        if not self.gpu:
            return {"gpu": "none: PyTorch on the CPU"}
        properties = torch.cuda.get_device_properties(0)
        asked = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,temperature.gpu,power.draw,power.limit,clocks_event_reasons.active"
        try:
            query = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
            said = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            said = ""
        try:
            third = flash_3().__name__
        except ImportError as error:
            third = str(error)
        return {
            "gpu": properties.name,
            "multiprocessors": properties.multi_processor_count,
            asked: said,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "FlashAttention-3": third,
        }

    def warm_up(self):
        """A second of matrix products: an idle GPU has low clocks."""
        x = torch.randn(4096, 4096, device=self.device, dtype=torch.float16) if self.gpu else torch.randn(64, 64)
        until = time.monotonic() + (1 if self.gpu else 0)
        while True:
            for _ in range(20):
                x @ x
            self.synchronize()
            if time.monotonic() >= until:
                return

    def clock(self):
        """MHz of the multiprocessors, read while the last row's kernels ran; None where it cannot be read."""
        return self.last_clock

    def read_clock(self):
        try:
            self.last_clock = torch.cuda.clock_rate() if self.gpu else None
        except Exception:  # noqa: BLE001, needs a module of its own
            self.last_clock = None

    def synchronize(self):
        if self.gpu:
            torch.cuda.synchronize()

    def alive(self):
        """Whether the GPU still works: after an invalid access it takes no more work in the process."""
        try:
            torch.zeros(1, device=self.device).add_(1).item()
            return True
        except Exception:  # noqa: BLE001
            return False

    def normal(self, shape, dtype, scale=1.0):
        return torch.randn(shape, device=self.device, dtype=TYPES[dtype]) * scale

    def octets(self, shape):
        return torch.randint(0, 256, shape, device=self.device, dtype=torch.uint8)

    def integers(self, numbers):
        return torch.tensor(numbers, device=self.device, dtype=torch.int64)

    def gates(self, batch, tokens, heads, share):
        """Exactly round(share * heads) heads of every token have a gate, the others 0."""
        order = torch.rand(batch, tokens, heads, device=self.device).argsort(-1)
        on = order < round(share * heads)
        return torch.where(on, 0.1 + torch.rand(batch, tokens, heads, device=self.device), 0.0)

    def poisoned(self, shape, dtype):
        return torch.full(shape, torch.nan, device=self.device, dtype=TYPES[dtype])

    def poison(self, tensor):
        tensor.fill_(torch.nan)

    def finite(self, tensor):
        return bool(torch.isfinite(tensor).all())

    def float64(self, tensor):
        return tensor.double().cpu().numpy()

    def bytes(self, tensor):
        return tensor.numel() * tensor.element_size()

    def swap(self, tensor, first, second):
        return tensor.transpose(first, second)

    def distance(self, found, expected, factor):
        expected = expected.float() * factor
        return ((found.float() * (factor != 0) - expected).norm() / expected.norm().clamp(min=1e-30)).item()

    def launcher(self, operator, attributes, inputs, output):
        describe = lambda tensor: (tensor.data_ptr(), NAMES[tensor.dtype], tuple(tensor.shape))
        if not all(tensor.is_contiguous() for tensor in [*inputs, output]):
            raise ValueError("tensors are contiguous")
        start = self.workspace.data_ptr()
        start += -start % 256
        workspace = (start, self.workspace.numel() - 256)
        call = self.kernels.call(operator, attributes, [describe(tensor) for tensor in inputs], describe(output), workspace)
        return lambda keep=(inputs, output): call(torch.cuda.current_stream().cuda_stream if self.gpu else 0)

    def graphed(self, name, listed):
        """The functions, one after the other, as one CUDA graph: only the GPU's time counts. Peers that cannot be captured run without."""

        def run():
            for function in listed:
                function()

        if not self.gpu:
            return run
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                run()
            graph.replay()
            self.synchronize()
            return graph.replay
        except RuntimeError as error:
            if name == "ours":
                raise
            print(f"{name}: not captured: {error}", file=sys.stderr)
            self.synchronize()
            return run

    def elapsed(self, run, count):
        """Milliseconds of `count` runs."""
        if not self.gpu:
            start = time.perf_counter()
            for _ in range(count):
                run()
            return (time.perf_counter() - start) * 1e3
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(count):
            run()
        end.record()
        self.read_clock()
        end.synchronize()
        return start.elapsed_time(end)

    def times(self, functions, rounds):
        """Milliseconds a call, in turns: {name: {median, min, max}}; a name has a function for each set of inputs."""
        runs = {name: self.graphed(name, listed) for name, listed in functions.items()}
        counts, found = {}, {name: [] for name in functions}
        for name, run in runs.items():
            self.elapsed(run, 2)
            counts[name] = max(1, min(500, int(WINDOW * 1e3 / max(self.elapsed(run, 2) / 2, 1e-3)))) if self.gpu else 1
        for _ in range(rounds):
            for name, run in runs.items():
                found[name].append(self.elapsed(run, counts[name]) / counts[name] / len(functions[name]))
        return {name: {"median": statistics.median(x), "min": min(x), "max": max(x)} for name, x in found.items()}

    def attention_peers(self, queries, keys, values, causal, bias):
        """Dense attention on (batch, heads, tokens, dim), of all heads and without gates; results are (batch, tokens, heads, dim).

        FA2 is PyTorch's FlashAttention-2. FA3 takes bfloat16 copies where its package has no float16: the time is the same.
        """
        grouped = queries.shape[1] != keys.shape[1]
        names = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FA2": SDPBackend.FLASH_ATTENTION}
        if bias is not None:  # FlashAttention takes none
            names = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}

        def dense(backend):
            with sdpa_kernel(backend):
                found = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, is_causal=causal, enable_gqa=grouped)
            return found.transpose(1, 2)

        peers = {name: lambda backend=backend: dense(backend) for name, backend in names.items()}
        if bias is None:
            third = []  # made at the first call: a copy, if one is needed
            peers["FA3"] = lambda: (third or third.append(self.flash_3_peer(queries, keys, values, causal)) or third)[0]()
        return peers

    def flash_3_peer(self, queries, keys, values, causal):
        module = flash_3()
        if queries.shape[2] == 1:  # chooses the number of splits itself
            function = lambda q, k, v: module.flash_attn_with_kvcache(q, k, v, causal=causal)
        else:
            function = lambda q, k, v: module.flash_attn_func(q, k, v, causal=causal)

        def peer(dtype):
            q, k, v = (x.transpose(1, 2).to(dtype) for x in (queries, keys, values))

            def run():
                found = function(q, k, v)
                return found[0] if isinstance(found, tuple) else found

            run()
            return run

        try:
            return peer(queries.dtype)
        except RuntimeError:
            if queries.dtype == torch.bfloat16:
                raise
            return peer(torch.bfloat16)

    def gathered_attention(self, queries, keys, values, gates):
        """FlashAttention-2 on the selected queries: each (sequence, head) is a sequence. Indices and the layout of keys are free."""
        made = []

        def run():
            if not made:
                made.append(self.gathered_peer(queries, keys, values, gates))
            made[0]()

        return run

    def gathered_peer(self, queries, keys, values, gates):
        from torch.nn.attention.varlen import varlen_attn

        batch, heads, length, dim = queries.shape
        on = gates.transpose(1, 2).reshape(batch * heads, length) != 0
        rows = on.reshape(-1).nonzero()[:, 0]
        ends = F.pad(on.sum(1).cumsum(0), (1, 0)).int()
        starts = torch.arange(batch * heads + 1, device=queries.device, dtype=torch.int32) * length
        most = int(on.sum(1).max())
        q, k, v = (x.contiguous().reshape(-1, 1, dim) for x in (queries, keys, values))
        weight = gates.transpose(1, 2).reshape(-1)[rows][:, None, None].to(q.dtype)
        output = torch.zeros_like(q)

        def run():
            found = varlen_attn(q.index_select(0, rows), k, v, ends, starts, most, length)
            output.index_copy_(0, rows, found * weight)

        return run

    def matmul(self, x, weight):
        return lambda: F.linear(x, weight)

    def mlp(self, x, wide, narrow):
        wide, narrow = wide.T.contiguous(), narrow.T.contiguous()
        return lambda: F.linear(F.silu(F.linear(x, wide)), narrow)

    def profiled(self, function):
        """Runs a function under a profiler that waits for this call."""
        self.synchronize()
        torch.cuda.profiler.start()
        function()
        self.synchronize()
        torch.cuda.profiler.stop()
