"""Rows of RoutedAttention: prefill, width 72, groups of query heads, cache layout, bias, decoding."""

import dataclasses

import numpy as np
import targets
from rows import Case, Wrong

TOKENS, WIDTH = 16384, 2048


@dataclasses.dataclass
class Attention:
    """One call. share: of the heads that each token uses. cache: keys and values as (batch, KV heads, tokens, dim).

    bias: None, "per-head" for (1, heads, q_len, kv_len), or "shared" for (1, 1, q_len, kv_len). judged_as: what target() returns, if not None.
    """

    dtype: str
    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    dim: int
    causal: bool
    share: float
    cache: bool = False
    bias: str = None
    gathered: bool = False
    judged_as: tuple = None

    def name(self):
        length = f"T={self.q_len}" if self.q_len == self.kv_len else f"keys={self.kv_len}" if self.q_len == 1 else f"T={self.q_len}, {self.kv_len} keys"
        heads = f"{self.heads}x{self.dim}" if self.heads == self.kv_heads else f"{self.heads}({self.kv_heads} KV)x{self.dim}"
        kinds = ["causal"] * (self.causal and self.q_len > 1) + ["cache"] * self.cache + [f"{self.bias} bias"] * bool(self.bias)
        return " ".join([self.dtype, f"B={self.batch}", length, heads, *kinds, f"r={self.share}"])

    def target(self):
        return self.judged_as or targets.attention(self)

    def small(self):
        """The row for the emulator, with the target of this one."""
        group = self.heads // self.kv_heads
        kv_heads = min(self.kv_heads, 4 if group == 1 else 2)
        sizes = dict(q_len=1, kv_len=70) if self.q_len == 1 else dict(q_len=40, kv_len=40)
        heads = dict(heads=group * kv_heads, kv_heads=kv_heads)
        return dataclasses.replace(self, batch=min(self.batch, 2), judged_as=self.target(), **sizes, **heads)


@dataclasses.dataclass
class Cached:
    """RoutedCachedAttention: `length` positions of the cache are written, the last q_len of them by these tokens."""

    dtype: str
    batch: int
    q_len: int
    capacity: int
    length: int
    heads: int
    kv_heads: int
    dim: int
    share: float

    def name(self):
        length = f"{self.length} of {self.capacity} keys" + (f", T={self.q_len}" if self.q_len > 1 else "")
        return f"{self.dtype} B={self.batch} {length} {self.heads}({self.kv_heads} KV)x{self.dim} r={self.share}"

    def target(self):
        return None

    def small(self):
        length, q_len = max(self.length * 70 // self.capacity, 3), min(self.q_len, 20)
        return dataclasses.replace(self, batch=min(self.batch, 2), q_len=q_len, capacity=70, length=max(length, q_len + 1), heads=8, kv_heads=2)


def prefill(dtype, length, dim, causal, share, tokens=TOKENS, width=WIDTH, **more):
    heads = width // dim
    return Attention(dtype, tokens // length, length, length, heads, more.pop("kv_heads", heads), dim, causal, share, **more)


def lengths(dim, quick):
    """Rows of one width of heads, those with targets at long sequences first."""
    for length in [4096, 1024, 512, 256] if quick else [4096, 1024, 16384, 8192, 2048, 512, 256]:
        for causal in [False, True]:
            for share in [0.75, 0.5, 1.0] if length > 512 else [0.9, 0.75, 0.5] if quick else [0.9, 0.75, 0.5, 1.0]:
                gathered = not quick and not causal and share < 1 and length in (512, 1024, 4096)
                yield prefill("f16", length, dim, causal, share, gathered=gathered)
                if share == 0.75 and (not quick or length in (512, 4096)):
                    yield prefill("bf16", length, dim, causal, share)


def width_72(quick):
    """DiT-XL: 16 heads of 72."""
    for length in [4096, 256] if quick else [4096, 1024, 256]:
        for share in [0.75, 0.5, 1.0]:
            yield prefill("f16", length, 72, False, share, width=16 * 72)
            if not quick and share == 0.75:
                yield prefill("bf16", length, 72, False, share, width=16 * 72)


def variants(quick):
    """Groups of query heads, the layout of a cache, biases."""
    for dtype in ["f16"] if quick else ["f16", "bf16"]:
        for share in [0.75] if quick or dtype == "bf16" else [0.75, 0.5, 1.0]:
            for length in [4096] if quick else [8192, 4096, 1024]:
                yield prefill(dtype, length, 128, True, share, tokens=max(length, 8192), width=32 * 128, kv_heads=8, cache=True)
                yield prefill(dtype, length, 128, True, share, tokens=max(length, 8192), width=32 * 128, kv_heads=8)
                yield prefill(dtype, length, 64, True, share, cache=True)
            yield prefill(dtype, 1024, 64, False, share, bias="per-head")
            yield prefill(dtype, 4096, 64, False, share, bias="shared")
            if not quick:
                yield prefill(dtype, 1024, 128, False, share, bias="per-head")


def decoding(quick):
    shapes = [(32, 8192, 32, 32, 64), (32, 8192, 32, 8, 128), (1, 8192, 32, 32, 64), (32, 8192, 32, 32, 128), (8, 32768, 32, 8, 128)]
    for dtype in ["f16"] if quick else ["f16", "bf16"]:
        for batch, keys, heads, kv_heads, dim in shapes[:3] if quick else shapes:
            for share in [0.5, 0.75, 1.0] if dtype == "f16" else [0.5]:
                yield Attention(dtype, batch, 1, keys, heads, kv_heads, dim, True, share, cache=True)


def cached(quick):
    """An 8B model's decoding, and a prompt of 512 tokens."""
    for dtype in ["f16"] if quick else ["f16", "bf16"]:
        for batch in [1] if quick else [1, 8]:
            for share in [0.75, 1.0]:
                for length in [128, 1024, 4096]:
                    yield Cached(dtype, batch, 1, 4096, length, 32, 8, 128, share)
                yield Cached(dtype, batch, 512, 4096, 1024, 32, 8, 128, share)


def build_cached(device, r):
    """The first position of the last sequence is padding; the peers see it."""
    cache = (r.batch, r.kv_heads, r.capacity, r.dim)
    query = device.normal((r.batch, r.q_len, r.heads * r.dim), r.dtype)
    key, value = device.normal(cache, r.dtype), device.normal(cache, r.dtype)
    for tensor in (key, value):
        tensor[:, :, r.length :] = float("nan")
    gates = device.gates(r.batch, r.q_len, r.heads, r.share)
    output = device.poisoned((r.batch, r.q_len, r.heads * r.dim), r.dtype)
    firsts = [0] * (r.batch - 1) + [1]
    attributes = dict(num_heads=r.heads, kv_num_heads=r.kv_heads, scale=r.dim**-0.5)
    positions = [device.integers(firsts), device.integers([r.length - r.q_len] * r.batch)]
    ours = device.launcher("RoutedCachedAttention", attributes, [query, key, value, gates, *positions], output)
    blocks = output.reshape(r.batch, r.q_len, r.heads, r.dim)
    queries = device.swap(query.reshape(r.batch, r.q_len, r.heads, r.dim), 1, 2)
    keys, values = key[:, :, : r.length], value[:, :, : r.length]
    random = np.random.default_rng(r.length)
    as_dense = Attention(r.dtype, r.batch, r.q_len, r.length, r.heads, r.kv_heads, r.dim, True, r.share)

    def reference():
        if not bool((blocks[gates == 0] == 0).all()):
            raise Wrong("a block of a head that is off is not 0")
        return sample_error(device, as_dense, random, queries, keys, values, gates, None, blocks, firsts)

    # A mask that begins within a longer sequence is none of theirs.
    peers = device.attention_peers(queries, keys, values, False, None) if r.q_len == 1 else {}
    moved = sum(device.bytes(x) for x in (query, keys, values, output, gates))
    return Case(ours, output, moved, reference, peers)


def build(device, row):
    """A case with new random inputs."""
    if isinstance(row, Cached):
        return build_cached(device, row)
    r, dim = row, row.dim
    query = device.normal((r.batch, r.q_len, r.heads * dim), r.dtype)
    kv_shape = (r.batch, r.kv_heads, r.kv_len, dim) if r.cache else (r.batch, r.kv_len, r.kv_heads * dim)
    key, value = device.normal(kv_shape, r.dtype), device.normal(kv_shape, r.dtype)
    gates = device.gates(r.batch, r.q_len, r.heads, r.share)
    bias = device.normal((1, r.heads if r.bias == "per-head" else 1, r.q_len, r.kv_len), r.dtype) if r.bias else None
    output = device.poisoned((r.batch, r.q_len, r.heads * dim), r.dtype)
    attributes = dict(num_heads=r.heads, kv_num_heads=r.kv_heads, scale=dim**-0.5, is_causal=int(r.causal))
    ours = device.launcher("RoutedAttention", attributes, [query, key, value, gates, *([bias] if r.bias else [])], output)
    blocks = output.reshape(r.batch, r.q_len, r.heads, dim)
    # All as (batch, heads, tokens, dim).
    queries = device.swap(query.reshape(r.batch, r.q_len, r.heads, dim), 1, 2)
    keys, values = (x if r.cache else device.swap(x.reshape(r.batch, r.kv_len, r.kv_heads, dim), 1, 2) for x in (key, value))
    random = np.random.default_rng(r.q_len + r.heads)

    def reference():
        if not bool((blocks[gates == 0] == 0).all()):
            raise Wrong("a block of a head that is off is not 0")
        return sample_error(device, r, random, queries, keys, values, gates, bias, blocks)

    def distance(found):
        """`found` is (batch, tokens, heads, dim), of all heads and without gates."""
        return device.distance(blocks, found, gates[..., None])

    peers = device.attention_peers(queries, keys, values, r.causal and r.q_len > 1, bias)
    if r.gathered:
        peers["gathered"] = device.gathered_attention(queries, keys, values, gates)
    moved = sum(device.bytes(x) for x in (query, key, value, output, gates)) + (device.bytes(bias) if r.bias else 0)
    return Case(ours, output, moved, reference, peers, lambda found: None if found is None else distance(found))


def some(random, length, number):
    """Sorted indices: around the edges of tiles, the last, and random ones."""
    edges = [i for i in (0, 63, 64, 127, 128, 191, 192, length - 1) if i < length]
    return sorted({*edges, *random.integers(0, length, number).tolist()})


def sample_error(device, r, random, queries, keys, values, gates, bias, blocks, firsts=None):
    """Relative error of up to two sequences, eight heads and 32 tokens against float64."""
    error = size = 0.0
    heads = sorted({0, r.heads - 1, *random.integers(0, r.heads, 6).tolist()})
    tokens = some(random, r.q_len, 24)
    rows = np.array(tokens)[:, None] + r.kv_len - r.q_len
    for batch in sorted({0, r.batch - 1}):
        for head in heads:
            kv_head = head // (r.heads // r.kv_heads)
            q, k, v = device.float64(queries[batch, head][tokens]), device.float64(keys[batch, kv_head]), device.float64(values[batch, kv_head])
            scores = q @ k.T * r.dim**-0.5
            if bias is not None:
                scores += device.float64(bias[0, head if r.bias == "per-head" else 0][tokens])
            if r.causal:
                scores[np.arange(r.kv_len)[None] > rows] = -np.inf
            if firsts is not None:
                scores[:, : firsts[batch]] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            expected = weights @ v / weights.sum(-1, keepdims=True) * device.float64(gates[batch, :, head][tokens])[:, None]
            found = device.float64(blocks[batch, :, head][tokens])
            error += ((found - expected) ** 2).sum()
            size += (expected**2).sum()
    return float(np.sqrt(error / size)) if size > 0 else float(np.sqrt(error))
