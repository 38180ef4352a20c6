"""Rows of RoutedProjection, RoutedCombine, RoutedMLP, and of products with quantised weights."""

import dataclasses

import numpy as np
from attention import TOKENS, WIDTH, some
from rows import Case, Wrong


@dataclasses.dataclass
class Linear:
    """A routed product with one matrix of width x width. zeros: a combination's x is as routed attention leaves it, otherwise random."""

    operator: str
    dtype: str
    tokens: int
    width: int
    heads: int
    share: float
    zeros: bool = True

    def name(self):
        kind = "" if self.zeros else ", random x"
        return f"{self.operator} {self.dtype} {self.tokens} tokens, {self.width} wide, {self.heads} heads r={self.share}{kind}"

    def target(self):
        return None

    def small(self):
        return dataclasses.replace(self, tokens=min(self.tokens, 40), width=min(self.width // self.heads, 72) * 4, heads=4)


@dataclasses.dataclass
class Quantised:
    """A routed product with a quantised matrix of width x width, symmetric, in blocks of 32."""

    operator: str
    dtype: str
    tokens: int
    width: int
    heads: int
    share: float
    bits: int = 4
    block: int = 32

    def name(self):
        return f"{self.operator} int{self.bits} {self.dtype} {self.tokens} tokens, {self.width} wide, {self.heads} heads r={self.share}"

    def target(self):
        return None

    def small(self):
        return dataclasses.replace(self, tokens=min(self.tokens, 40), width=128, heads=4)


@dataclasses.dataclass
class Layer:
    """LinearNBits: a dense layer with a quantised matrix of out x width, symmetric, in blocks of 32."""

    dtype: str
    tokens: int
    width: int
    out: int
    bits: int = 4
    block: int = 32

    def name(self):
        return f"LinearNBits int{self.bits} {self.dtype} {self.tokens} tokens, {self.width} to {self.out}"

    def target(self):
        return None

    def small(self):
        return dataclasses.replace(self, tokens=min(self.tokens, 40), width=128, out=144)


@dataclasses.dataclass
class Experts:
    """Mixtures of experts in f16: against dense products of as many columns as a token uses."""

    operator: str
    number: int
    used: int
    tokens: int
    width: int = 1024
    dim: int = 128
    hidden: int = 2048
    dtype: str = "f16"

    def name(self):
        return f"{self.operator} {self.used} of {self.number} experts, {self.tokens} tokens"

    def target(self):
        return None

    def small(self):
        return dataclasses.replace(self, tokens=min(self.tokens, 40), width=64, dim=64, hidden=64)


def linear(quick):
    for dtype in ["f16"] if quick else ["f16", "bf16"]:
        for tokens, width, heads in [(TOKENS, WIDTH, 32), (4096, 1152, 16), (32, 4096, 32), (TOKENS, 2 * WIDTH, 32)]:
            for share in [0.75, 1.0, 0.5] if dtype == "f16" else [0.75]:
                for operator in ["RoutedProjection", "RoutedCombine"]:
                    yield Linear(operator, dtype, tokens, width, heads, share)
    # Other ways of a combination.
    for share in [0.75, 0.5, 0.1]:
        yield Linear("RoutedCombine", "f16", TOKENS, WIDTH, 32, share, zeros=False)


def experts(quick):
    for tokens in [4096] if quick else [512, 4096, TOKENS]:
        for number in [8, 32, 64]:
            for operator in ["RoutedProjection", "RoutedCombine"]:
                yield Experts(operator, number, 8, tokens)
    for number, used in [(8, 2)] if quick else [(4, 1), (8, 2), (16, 4)]:
        for tokens in [8, 2048]:
            yield Experts("RoutedMLP", number, used, tokens)


def quantised(quick):
    """The projections of an 8B model: decoding, a small batch, a prompt."""
    for tokens in [1, 8, 512] if quick else [1, 4, 8, 16, 32, 128, 512, 4096]:
        for share in [0.75, 1.0] if quick else [0.75, 1.0, 0.5]:
            for operator in ["RoutedCombine", "RoutedProjection"]:
                yield Quantised(operator, "f16", tokens, 4096, 32, share)
                if not quick:
                    yield Quantised(operator, "f16", tokens, 4096, 32, share, bits=8)
                    yield Quantised(operator, "bf16", tokens, 4096, 32, share)
        for dtype, bits in [("f16", 4)] if quick else [("f16", 4), ("f16", 8), ("bf16", 4)]:
            yield Layer(dtype, tokens, 4096, 14336, bits)
    yield Layer("f16", 1, 4096, 128256)


def build(device, row):
    builders = {Linear: build_linear, Quantised: build_quantised, Layer: build_layer, Experts: build_experts}
    return builders[type(row)](device, row)


def build_linear(device, r):
    x = device.normal((1, r.tokens, r.width), r.dtype)
    weight = device.normal((r.width, r.width), r.dtype, r.width**-0.5)
    gates = device.gates(1, r.tokens, r.heads, r.share)
    if r.operator == "RoutedCombine" and r.zeros:
        leave_zeros(x, gates)
    output = device.poisoned((1, r.tokens, r.width), r.dtype)
    ours = device.launcher(r.operator, dict(num_heads=r.heads, weight_layout=0), [x, weight, gates], output)
    block, combine = r.width // r.heads, r.operator == "RoutedCombine"
    random = np.random.default_rng(r.tokens)

    def reference():
        tokens, columns = some(random, r.tokens, 40), some(random, r.width, 200)
        on = np.repeat(device.float64(gates[0][tokens]) != 0, block, -1)
        inputs = device.float64(x[0][tokens])
        expected = (inputs * on if combine else inputs) @ device.float64(weight[columns]).T
        expected = expected if combine else expected * on[:, columns]
        return compared(device.float64(output[0][tokens][:, columns]), expected, None if combine else on[:, columns])

    def distance(found):
        """`found` is the dense product: of the same size for a projection, where it counts for the heads that are on."""
        if combine:
            return None
        return device.distance(output.reshape(r.tokens, r.heads, block), found.reshape(r.tokens, r.heads, block), (gates[0] != 0)[..., None])

    moved = sum(device.bytes(tensor) for tensor in (x, weight, gates, output))
    return Case(ours, output, moved, reference, {"matmul": device.matmul(x, weight)}, distance)


def leave_zeros(x, gates):
    """Zeros in the blocks of heads that are off, as routed attention leaves them."""
    x.reshape(*gates.shape, -1)[gates == 0] = 0


def build_quantised(device, r):
    """The peers are our operator without quantisation and the dense product, both with the weight in r.dtype."""
    x = device.normal((1, r.tokens, r.width), r.dtype)
    weight, scales = quantised_matrix(device, r, r.width)
    gates = device.gates(1, r.tokens, r.heads, r.share)
    if r.operator == "RoutedCombine":
        leave_zeros(x, gates)
    output, plain = (device.poisoned((1, r.tokens, r.width), r.dtype) for _ in range(2))
    attributes = dict(num_heads=r.heads, bits=r.bits, block_size=r.block, accuracy_level=0)
    ours = device.launcher(f"{r.operator}NBits", attributes, [x, weight, scales, gates], output)
    dense = device.normal((r.width, r.width), r.dtype, r.width**-0.5)
    unquantised = device.launcher(r.operator, dict(num_heads=r.heads, weight_layout=0), [x, dense, gates], plain)
    combine, random = r.operator == "RoutedCombine", np.random.default_rng(r.tokens)

    def reference():
        tokens, columns = some(random, r.tokens, 40), some(random, r.width, 200)
        on = np.repeat(device.float64(gates[0][tokens]) != 0, r.width // r.heads, -1)
        inputs = device.float64(x[0][tokens])
        expected = (inputs * on if combine else inputs) @ rows_of(device, r, weight, scales, columns).T
        expected = expected if combine else expected * on[:, columns]
        return compared(device.float64(output[0][tokens][:, columns]), expected, None if combine else on[:, columns])

    moved = sum(device.bytes(tensor) for tensor in (x, weight, scales, gates, output))
    return Case(ours, output, moved, reference, {"unquantised": unquantised, "matmul": device.matmul(x, dense)})


def quantised_matrix(device, r, rows):
    """Weight and scales of `rows` rows, for outputs near 1."""
    blocks = r.width // r.block
    weight = device.octets((rows, blocks, r.block * r.bits // 8))
    return weight, device.normal((rows, blocks), r.dtype, r.width**-0.5 / (1 << (r.bits - 1)))


def rows_of(device, r, weight, scales, columns):
    """Rows of a quantised weight in float64."""
    bytes_ = device.float64(weight[columns]).astype(np.uint8).reshape(len(columns), -1)
    q = np.stack([bytes_ & 15, bytes_ >> 4], -1).reshape(len(columns), -1) if r.bits == 4 else bytes_
    return (q.astype(np.float64) - (1 << (r.bits - 1))) * np.repeat(device.float64(scales[columns]), r.block, -1)


def build_layer(device, r):
    x = device.normal((1, r.tokens, r.width), r.dtype)
    weight, scales = quantised_matrix(device, r, r.out)
    output = device.poisoned((1, r.tokens, r.out), r.dtype)
    ours = device.launcher("LinearNBits", dict(bits=r.bits, block_size=r.block, accuracy_level=0), [x, weight, scales], output)
    dense, random = device.normal((r.out, r.width), r.dtype, r.width**-0.5), np.random.default_rng(r.tokens)

    def reference():
        tokens, columns = some(random, r.tokens, 40), some(random, r.out, 200)
        expected = device.float64(x[0][tokens]) @ rows_of(device, r, weight, scales, columns).T
        return compared(device.float64(output[0][tokens][:, columns]), expected)

    moved = sum(device.bytes(tensor) for tensor in (x, weight, scales, output))
    return Case(ours, output, moved, reference, {"matmul": device.matmul(x, dense)})


def compared(found, expected, on=None):
    """Relative error; where `on` is false, only 0 is right."""
    if on is not None and (found[~on] != 0).any():
        raise Wrong("a block of a head that is off is not 0")
    return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30))


def build_experts(device, r):
    """Weights have rows of inputs; the dense peers' matrices have rows of outputs."""
    draw = lambda *shape: device.normal(shape, r.dtype, shape[-2] ** -0.5)
    x = device.normal((1, r.tokens, r.number * r.dim if r.operator == "RoutedCombine" else r.width), r.dtype)
    gates = device.gates(1, r.tokens, r.number, r.used / r.number)
    if r.operator == "RoutedCombine":
        leave_zeros(x, gates)
    attributes = dict(num_heads=r.number, weight_layout=1)
    if r.operator == "RoutedMLP":
        weights, attributes = [draw(r.number, r.width, r.hidden), draw(r.number, r.hidden, r.width)], dict(num_experts=r.number, activation=3)
        columns, peer = r.width, device.mlp(x, draw(r.width, r.used * r.hidden), draw(r.used * r.hidden, r.width))
    elif r.operator == "RoutedProjection":
        weights, columns = [draw(r.number, r.width, r.dim)], r.number * r.dim
        peer = device.matmul(x, draw(r.used * r.dim, r.width))
    else:
        weights, columns = [draw(r.number, r.dim, r.width)], r.width
        peer = device.matmul(device.normal((1, r.tokens, r.used * r.dim), r.dtype), draw(r.width, r.used * r.dim))
    output = device.poisoned((1, r.tokens, columns), r.dtype)
    ours = device.launcher(r.operator, attributes, [x, *weights, gates], output)
    random = np.random.default_rng(r.tokens)

    def reference():
        tokens = some(random, r.tokens, 16)
        inputs, chosen = device.float64(x[0][tokens]), device.float64(gates[0][tokens])
        expected, on = np.zeros((len(tokens), columns)), None
        for expert in range(r.number):
            rows = np.nonzero(chosen[:, expert])[0]
            block = slice(expert * r.dim, (expert + 1) * r.dim)
            first = device.float64(weights[0][expert])
            if r.operator == "RoutedProjection":
                expected[rows, block] = inputs[rows] @ first
            elif r.operator == "RoutedCombine":
                expected[rows] += inputs[rows, block] @ first
            else:
                inner = inputs[rows] @ first
                inner = inner / (1 + np.exp(-inner))
                expected[rows] += (inner @ device.float64(weights[1][expert])) * chosen[rows, expert][:, None]
        if r.operator == "RoutedProjection":
            on = np.repeat(chosen != 0, r.dim, -1)
        return compared(device.float64(output[0][tokens]), expected, on)

    moved = sum(device.bytes(tensor) for tensor in (x, *weights, gates, output))
    return Case(ours, output, moved, reference, {"dense": peer}, None)
