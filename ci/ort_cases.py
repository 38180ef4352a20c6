"""Writes small models of one ai.moh operator, with inputs and expected outputs, for ort_check.py.

usage: ort_cases.py FOLDER        (needs onnx and numpy)

The expected outputs are computed here in float64, independently of the library.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

DOMAIN = "ai.moh"
TYPES = {"f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
TOLERANCE = {"f32": 2e-5, "f16": 4e-3, "bf16": 3e-2}
BATCH, Q_LEN, KV_LEN, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 2, 5, 7, 4, 2, 16, 8
SYMBOLS = {"batch": BATCH, "q_len": Q_LEN, "kv_len": KV_LEN}


def round_to(dtype, x):
    """x (float32) rounded to dtype, as float32."""
    if dtype == "f16":
        return x.astype(np.float16).astype(np.float32)
    if dtype == "bf16":
        bits = x.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return x


def reference(inputs, attributes):
    """RoutedAttention, densely, in float64."""
    query, key, value, gates = (inputs[n].astype(np.float64) for n in ("query", "key", "value", "head_gates"))
    heads, kv_heads = attributes["num_heads"], attributes["kv_num_heads"]
    split = lambda x, h: x.reshape(x.shape[0], x.shape[1], h, x.shape[2] // h).transpose(0, 2, 1, 3)
    query = split(query, heads)
    if key.ndim == 3:
        key, value = split(key, kv_heads), split(value, kv_heads)
    key, value = (np.repeat(x, heads // kv_heads, axis=1) for x in (key, value))
    scores = attributes["scale"] * query @ key.transpose(0, 1, 3, 2)
    if "attn_bias" in inputs:
        scores = scores + inputs["attn_bias"]
    if attributes["is_causal"]:
        q_len, kv_len = scores.shape[2:]
        scores = np.where(np.arange(kv_len) <= np.arange(q_len)[:, None] + kv_len - q_len, scores, -np.inf)
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isinf(top), 0, top))
    total = weights.sum(-1, keepdims=True)
    out = np.where(total > 0, weights @ value / np.where(total > 0, total, 1), 0)
    gates = gates.transpose(0, 2, 1)[..., None]
    out = np.where(gates == 0, 0, gates * out).transpose(0, 2, 1, 3)
    return out.reshape(out.shape[0], out.shape[1], out.shape[2] * out.shape[3])


def dequantise(bits, weight, scales, zero_points):
    """A matrix (rows, k) in float64, from the layout of com.microsoft.MatMulNBits."""
    unpack = lambda x: np.stack([x & 15, x >> 4], -1).reshape(*x.shape[:-1], -1) if bits == 4 else x
    zeros = 2.0 ** (bits - 1) if zero_points is None else unpack(zero_points)[:, : scales.shape[1], None].astype(np.float64)
    return ((unpack(weight) - zeros) * scales[..., None].astype(np.float64)).reshape(len(weight), -1)


class Cases:
    def __init__(self, folder):
        self.folder, self.list = Path(folder), []
        self.folder.mkdir(parents=True, exist_ok=True)

    def add(self, name, expect="ok", message="", since="1.17", dtype="f32", cache=False, bias=None, causal=0, dims="symbolic",
            attributes=None, drop=(), types=None, shapes=None, wrong_feed=None, external=False, sizes=None, empty_name=False):
        """One model.

        expect: "ok", or where the error comes: "load" or "run", or some of these; message: part of the error's text.
        since: the first version of onnxruntime that can run it. dims: "symbolic", "static" or "unranked" graph inputs. attributes, drop, types, shapes: what is changed or left out.
        wrong_feed: input -> shape fed at run time. external: key and value are initializers in a file, misaligned.
        sizes: of symbols, where they are others. empty_name: the bias is there, but its name is empty.
        """
        sizes = SYMBOLS | (sizes or {})
        rng = np.random.default_rng(len(self.list))
        shape = {
            "query": ["batch", "q_len", HEADS * HEAD_DIM],
            "key": ["batch", KV_HEADS, "kv_len", HEAD_DIM] if cache else ["batch", "kv_len", KV_HEADS * HEAD_DIM],
            "value": ["batch", KV_HEADS, "kv_len", VALUE_DIM] if cache else ["batch", "kv_len", KV_HEADS * VALUE_DIM],
            "head_gates": ["batch", "q_len", HEADS],
        }
        if bias:
            shape["attn_bias"] = list(bias)
        shape.update(shapes or {})
        attrs = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "scale": HEAD_DIM**-0.5, "is_causal": causal}
        attrs.update(attributes or {})
        feeds = {}
        for name_, dims_ in shape.items():
            size = [sizes.get(d, d) for d in dims_]
            feeds[name_] = round_to(dtype, rng.standard_normal(size).astype(np.float32))
        gates = feeds["head_gates"]
        feeds["head_gates"] = (gates * (rng.random(gates.shape) < 0.6)).astype(np.float32)
        if bias:
            feeds["attn_bias"][rng.random(feeds["attn_bias"].shape) < 0.3] = -np.inf

        nodes, inputs, initializers = [], [], []
        operands = []
        for operand in shape:
            if operand in drop:
                continue
            ty = TYPES[dtype] if operand != "head_gates" else TensorProto.FLOAT
            ty = (types or {}).get(operand, ty)
            operands.append(operand + "_cast" if ty == TensorProto.BFLOAT16 else operand)
            if external and operand in ("key", "value"):
                array = feeds.pop(operand).astype(helper.tensor_dtype_to_np_dtype(ty))
                initializers.append(numpy_helper.from_array(array, operand))
                continue
            # numpy has no bfloat16: the graph takes float32 and casts.
            declared = TensorProto.FLOAT if ty == TensorProto.BFLOAT16 else ty
            dims_ = {"symbolic": shape[operand], "static": [sizes.get(d, d) for d in shape[operand]], "unranked": None}
            inputs.append(helper.make_tensor_value_info(operand, declared, dims_[dims]))
            if ty == TensorProto.BFLOAT16:
                nodes.append(helper.make_node("Cast", [operand], [operand + "_cast"], to=ty))
            feeds[operand] = feeds[operand].astype(helper.tensor_dtype_to_np_dtype(declared))
        if empty_name:
            operands.append("")
        kept = {k: v for k, v in attrs.items() if k not in drop}
        result = "output_raw" if dtype == "bf16" else "output"
        nodes.append(helper.make_node("RoutedAttention", operands, [result], name="node", domain=DOMAIN, **kept))
        if dtype == "bf16":
            nodes.append(helper.make_node("Cast", [result], ["output"], to=TensorProto.FLOAT))
        out_type = TensorProto.FLOAT if dtype == "bf16" else TYPES[dtype]
        output = helper.make_tensor_value_info("output", out_type, None)
        graph = helper.make_graph(nodes, name, inputs, [output], initializers)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
        model = helper.make_model(graph, ir_version=8, opset_imports=opsets)
        path = self.folder / f"{name}.onnx"
        expected = {}
        if "ok" in expect.split():
            values = {k: v.astype(np.float32) for k, v in feeds.items()}
            values.update({i.name: numpy_helper.to_array(i).astype(np.float32) for i in initializers})
            expected = {"expected": reference(values, attrs)}
        if external:
            write_misaligned(model, self.folder / f"{name}.data")
        path.write_bytes(model.SerializeToString())
        for operand, size in (wrong_feed or {}).items():
            feeds[operand] = np.zeros(size, feeds[operand].dtype)
        feeds = {k: v for k, v in feeds.items() if k not in drop}
        np.savez(self.folder / f"{name}.npz", **feeds, **expected)
        shape_out = ["batch", "q_len", HEADS * VALUE_DIM] if dims == "symbolic" else [sizes["batch"], sizes["q_len"], HEADS * VALUE_DIM]
        self.list.append({
            "name": name, "expect": expect, "message": message, "tolerance": TOLERANCE[dtype], "since": since,
            "shape": None if dims == "unranked" else shape_out,
        })


    def add_router(self, name, expect="ok", message="", heads=6, top_k=2, shared=(0, 1), attributes=None):
        """One model of TopKRouter's two stages, with at least two shared heads or none."""
        rng = np.random.default_rng(len(self.list))
        routed = [h for h in range(heads) if h not in shared]
        columns = len(routed) + (2 + len(shared) if shared else 0)
        scores = rng.standard_normal((BATCH, Q_LEN, columns)).astype(np.float32)
        softmax = lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)
        wide = scores.astype(np.float64)
        order = np.argsort(-wide[..., : len(routed)], axis=-1, kind="stable")[..., :top_k]
        balance = 2 * softmax(wide[..., len(routed) : len(routed) + 2]) if shared else np.ones((BATCH, Q_LEN, 2))
        gates = np.zeros((BATCH, Q_LEN, heads))
        selected = top_k * softmax(np.take_along_axis(wide, order, -1)) * balance[..., 1:]
        np.put_along_axis(gates, np.array(routed)[order], selected, -1)
        gates[..., list(shared)] = len(shared) * softmax(wide[..., len(routed) + 2 :]) * balance[..., :1]
        attrs = {"kind": 0, "num_heads": heads, "top_k": top_k}
        node = helper.make_node("TopKRouter", ["scores"], ["output"], name="node", domain=DOMAIN, **attrs)
        # make_node leaves empty lists out.
        ints = onnx.AttributeProto(name="shared_heads", type=onnx.AttributeProto.INTS, ints=shared)
        node.attribute.append(helper.make_attribute("shared_heads", attributes) if attributes is not None else ints)
        value = lambda name, size: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "q_len", size])
        graph = helper.make_graph([node], name, [value("scores", columns)], [helper.make_tensor_value_info("output", TensorProto.FLOAT, None)])
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
        (self.folder / f"{name}.onnx").write_bytes(helper.make_model(graph, ir_version=8, opset_imports=opsets).SerializeToString())
        np.savez(self.folder / f"{name}.npz", scores=scores, **({"expected": gates} if expect == "ok" else {}))
        self.list.append({
            "name": name, "expect": expect, "message": message, "tolerance": TOLERANCE["f32"], "since": "1.17",
            "shape": ["batch", "q_len", heads],
        })

    def add_nbits(self, name, operator="RoutedProjectionNBits", bits=4, dtype="f32", zero_points=False, external=False,
                  expect="ok", message="", attributes=None, weight_columns=None):
        """One model of an operator with a quantised weight, an initializer. external: in a file, misaligned."""
        rng = np.random.default_rng(len(self.list))
        projection, block, width = operator == "RoutedProjectionNBits", 32, 96
        # A block belongs to two heads.
        rows, k = (HEADS * HEAD_DIM, width) if projection else (width, HEADS * HEAD_DIM)
        x = round_to(dtype, rng.standard_normal((BATCH, Q_LEN, k)).astype(np.float32))
        gates = (rng.random((BATCH, Q_LEN, HEADS)) * (rng.random((BATCH, Q_LEN, HEADS)) < 0.6)).astype(np.float32)
        weight = rng.integers(0, 256, (rows, k // block, block * bits // 8), np.uint8)
        scales = round_to(dtype, (rng.standard_normal((rows, k // block)) / 2 ** (bits + 2)).astype(np.float32))
        packed = rng.integers(0, 256, (rows, -(-k // block * bits // 8)), np.uint8) if zero_points else None
        bias = round_to(dtype, rng.standard_normal(rows).astype(np.float32))
        matrix = dequantise(bits, weight, scales, packed)
        on = np.repeat(gates != 0, HEAD_DIM, -1)
        expected = np.where(on, x @ matrix.T + bias, 0) if projection else np.where(on, x, 0) @ matrix.T + bias
        floats = helper.tensor_dtype_to_np_dtype(TYPES[dtype])
        constants = {"weight": weight[..., :weight_columns], "scales": scales.astype(floats), "bias": bias.astype(floats)}
        if zero_points and not projection:
            expected = self.after(constants, expected, dtype, rng)
        if zero_points:
            constants["zero_points"] = packed
        inputs = ["x", "weight", "scales", "head_gates", *list(constants)[2:]]
        attrs = {"num_heads": HEADS, "bits": bits, "block_size": block, "accuracy_level": 0} | (attributes or {})
        node = helper.make_node(operator, inputs, ["output"], name="node", domain=DOMAIN, **attrs)
        info = helper.make_tensor_value_info
        graph = helper.make_graph(
            [node], name,
            [info("x", TYPES[dtype], ["batch", "q_len", k]), info("head_gates", TensorProto.FLOAT, ["batch", "q_len", HEADS])],
            [info("output", TYPES[dtype], None)],
            [numpy_helper.from_array(array, constant) for constant, array in constants.items()],
        )
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 2)]
        model = helper.make_model(graph, ir_version=8, opset_imports=opsets)
        if external:
            write_misaligned(model, self.folder / f"{name}.data")
        (self.folder / f"{name}.onnx").write_bytes(model.SerializeToString())
        found = {"expected": expected} if expect == "ok" else {}
        np.savez(self.folder / f"{name}.npz", x=x.astype(floats), head_gates=gates, **found)
        self.list.append({
            "name": name, "expect": expect, "message": message, "tolerance": TOLERANCE[dtype], "since": "1.17",
            "shape": ["batch", "q_len", rows],
        })


    def after(self, constants, sums, dtype, rng):
        """Adds a gate of a row and a residual of one number to the constants; what becomes of the sums."""
        floats = helper.tensor_dtype_to_np_dtype(TYPES[dtype])
        gate = round_to(dtype, rng.standard_normal((1, 1, sums.shape[-1])).astype(np.float32))
        constants |= {"gate": gate.astype(floats), "residual": np.array([0.5], floats)}
        return sums * gate + 0.5

    def add_linear(self, name, bits=4, dtype="f32", zero_points=False, level=0):
        """One model of LinearNBits, whose weight is an initializer."""
        rng = np.random.default_rng(len(self.list))
        block, rows, k = 32, 48, 96
        x = round_to(dtype, rng.standard_normal((BATCH, Q_LEN, k)).astype(np.float32))
        weight = rng.integers(0, 256, (rows, k // block, block * bits // 8), np.uint8)
        scales = round_to(dtype, (rng.standard_normal((rows, k // block)) / 2 ** (bits + 2)).astype(np.float32))
        packed = rng.integers(0, 256, (rows, -(-k // block * bits // 8)), np.uint8) if zero_points else None
        bias = round_to(dtype, rng.standard_normal(rows).astype(np.float32))
        floats = helper.tensor_dtype_to_np_dtype(TYPES[dtype])
        constants = {"weight": weight, "scales": scales.astype(floats), "bias": bias.astype(floats)}
        expected = x @ dequantise(bits, weight, scales, packed).T + bias
        if zero_points:
            expected = self.after(constants, expected, dtype, rng)
            constants["zero_points"] = packed
        attrs = {"bits": bits, "block_size": block, "accuracy_level": level}
        node = helper.make_node("LinearNBits", ["x", *constants], ["output"], name="node", domain=DOMAIN, **attrs)
        tolerance = 5e-2 if level == 4 else TOLERANCE[dtype]
        self.write(name, node, TYPES[dtype], {"x": (x.astype(floats), ["batch", "q_len", k])}, expected, tolerance,
                   ["batch", "q_len", rows], constants)

    def add_cached(self, name, dtype="f32", room=9):
        """One model of RoutedCachedAttention: sequences of unequal length, padded on the left and on the right."""
        rng = np.random.default_rng(len(self.list))
        first, start = np.array([0, 2]), np.array([3, 1])
        capacity = KV_LEN + room
        draw = lambda *size: round_to(dtype, rng.standard_normal(size).astype(np.float32))
        query = draw(BATCH, Q_LEN, HEADS * HEAD_DIM)
        key, value = draw(BATCH, KV_HEADS, capacity, HEAD_DIM), draw(BATCH, KV_HEADS, capacity, VALUE_DIM)
        gates = (rng.random((BATCH, Q_LEN, HEADS)) * (rng.random((BATCH, Q_LEN, HEADS)) < 0.6)).astype(np.float32)
        scale = HEAD_DIM**-0.5
        expected = np.zeros((BATCH, Q_LEN, HEADS, VALUE_DIM))
        for b, i, h in np.ndindex(BATCH, Q_LEN, HEADS):
            seen, kv = slice(first[b], max(first[b], start[b] + i + 1)), h * KV_HEADS // HEADS
            q = query[b, i].reshape(HEADS, HEAD_DIM)[h].astype(np.float64)
            scores = np.exp(scale * key[b, kv, seen].astype(np.float64) @ q)
            if scores.size:
                expected[b, i, h] = gates[b, i, h] * (scores / scores.sum()) @ value[b, kv, seen]
        # What no query sees is never read.
        for b in range(BATCH):
            key[b, :, : first[b]] = value[b, :, : first[b]] = np.nan
            key[b, :, start[b] + Q_LEN :] = value[b, :, start[b] + Q_LEN :] = np.nan
        floats = helper.tensor_dtype_to_np_dtype(TYPES[dtype])
        inputs = {
            "query": (query.astype(floats), ["batch", "q_len", HEADS * HEAD_DIM]),
            "key": (key.astype(floats), ["batch", KV_HEADS, "capacity", HEAD_DIM]),
            "value": (value.astype(floats), ["batch", KV_HEADS, "capacity", VALUE_DIM]),
            "head_gates": (gates, ["batch", "q_len", HEADS]),
            "first": (first, ["batch"]),
            "start": (start, ["batch"]),
        }
        attrs = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "scale": scale}
        node = helper.make_node("RoutedCachedAttention", [*inputs], ["output"], name="node", domain=DOMAIN, **attrs)
        self.write(name, node, TYPES[dtype], inputs, expected.reshape(BATCH, Q_LEN, -1), TOLERANCE[dtype],
                   ["batch", "q_len", HEADS * VALUE_DIM])

    def add_update(self, name, dtype="f32", capacity=6, total=6):
        """One model of CacheUpdate; the cache grows where `total` is larger."""
        rng = np.random.default_rng(len(self.list))
        start, new = np.array([3, 1]), 2
        past = round_to(dtype, rng.standard_normal((BATCH, KV_HEADS, capacity, HEAD_DIM)).astype(np.float32))
        update = round_to(dtype, rng.standard_normal((BATCH, new, KV_HEADS * HEAD_DIM)).astype(np.float32))
        expected = np.zeros((BATCH, KV_HEADS, max(capacity, total), HEAD_DIM))
        expected[:, :, :capacity] = past
        for b in range(BATCH):
            expected[b, :, start[b] : start[b] + new] = update[b].reshape(new, KV_HEADS, HEAD_DIM).transpose(1, 0, 2)
        floats = helper.tensor_dtype_to_np_dtype(TYPES[dtype])
        inputs = {
            "past": (past.astype(floats), ["batch", KV_HEADS, "capacity", HEAD_DIM]),
            "update": (update.astype(floats), ["batch", "q_len", KV_HEADS * HEAD_DIM]),
            "attention_mask": (np.ones((BATCH, total), np.int64), ["batch", "total"]),
            "start": (start, ["batch"]),
        }
        node = helper.make_node("CacheUpdate", [*inputs], ["output"], name="node", domain=DOMAIN)
        self.write(name, node, TYPES[dtype], inputs, expected, TOLERANCE[dtype], None)

    def write(self, name, node, output_type, inputs, expected, tolerance, shape, constants=None):
        """A model of one node of version 2. inputs: array and dimensions by name; shape: what is to be inferred, None: not compared."""
        info = helper.make_tensor_value_info
        typed = lambda item: info(item[0], helper.np_dtype_to_tensor_dtype(item[1][0].dtype), item[1][1])
        constants = [numpy_helper.from_array(array, constant) for constant, array in (constants or {}).items()]
        graph = helper.make_graph([node], name, [typed(item) for item in inputs.items()], [info("output", output_type, None)], constants)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 2)]
        (self.folder / f"{name}.onnx").write_bytes(helper.make_model(graph, ir_version=8, opset_imports=opsets).SerializeToString())
        np.savez(self.folder / f"{name}.npz", **{name: array for name, (array, _) in inputs.items()}, expected=expected)
        self.list.append({"name": name, "expect": "ok", "message": "", "tolerance": tolerance, "since": "1.17", "shape": shape})


def write_misaligned(model, path):
    """Moves the initializers to a file, each at an odd offset."""
    with open(path, "wb") as file:
        for tensor in model.graph.initializer:
            data = tensor.raw_data
            file.write(b"\0" * (1 + file.tell() % 2))
            offset = file.tell()
            file.write(data)
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in ("location", path.name), ("offset", offset), ("length", len(data)):
                tensor.external_data.add(key=key, value=str(value))


def main(folder):
    cases = Cases(folder)
    for dtype in TYPES:
        for cache in (False, True):
            layout = "cache" if cache else "rows"
            cases.add(f"{dtype}-{layout}", dtype=dtype, cache=cache)
            cases.add(f"{dtype}-{layout}-padding", dtype=dtype, cache=cache, bias=["batch", 1, 1, "kv_len"])
    cases.add("causal", causal=1)
    cases.add("static-dims", dims="static", bias=["batch", HEADS, "q_len", "kv_len"])
    cases.add("unknown-ranks", dims="unranked", bias=["q_len", "kv_len"])
    cases.add("misaligned-initializers", external=True, dims="static")
    cases.add("misaligned-initializers-f16", external=True, dims="static", dtype="f16")

    for symbol in SYMBOLS:
        cases.add(f"{symbol}-0", sizes={symbol: 0}, bias=["batch", 1, 1, "kv_len"])
    # Older hosts read the type of an input that is not there.
    cases.add("empty-name", empty_name=True, since="1.24")

    cases.add_router("router")
    cases.add_router("router-any-heads", heads=9, shared=(2, 5, 8))
    cases.add_router("router-no-shared-heads", shared=())
    message = "attribute shared_heads: expected Ints, found Int(1)"
    cases.add_router("router-attribute-type", "load", message, attributes=1)
    message = "attribute shared_heads: expected ascending heads"
    cases.add_router("router-attribute-value", "load", message, attributes=[1, 0])

    for bits in (4, 8):
        for operator in ("RoutedProjectionNBits", "RoutedCombineNBits"):
            cases.add_nbits(f"{operator}-{bits}", operator, bits)
            cases.add_nbits(f"{operator}-{bits}-zero-points", operator, bits, dtype="f16", zero_points=True)
    cases.add_nbits("nbits-misaligned-initializers", external=True, zero_points=True)
    cases.add_nbits("nbits-bits", expect="load", message="attribute bits: expected 4 or 8, found 3", attributes={"bits": 3})
    cases.add_nbits("nbits-block", expect="load", message="a multiple of block_size = 64", attributes={"block_size": 64})
    cases.add_nbits("nbits-weight", expect="load", message="input weight: expected shape (4 * head_dim, 3, 16)", weight_columns=8)

    for bits in (4, 8):
        cases.add_linear(f"LinearNBits-{bits}", bits)
        cases.add_linear(f"LinearNBits-{bits}-zero-points", bits, dtype="f16", zero_points=True)
        cases.add_linear(f"LinearNBits-{bits}-int8-activations", bits, level=4)
    for dtype in ("f32", "f16"):
        cases.add_cached(f"RoutedCachedAttention-{dtype}", dtype)
        cases.add_update(f"CacheUpdate-{dtype}", dtype)
    cases.add_cached("RoutedCachedAttention-no-room", room=-KV_LEN + 3 + Q_LEN)
    cases.add_update("CacheUpdate-grows", total=11)

    cases.add("missing-attribute", "load", "attribute scale: expected Float, found nothing", drop=["scale"])
    cases.add("attribute-type", "load", "attribute is_causal: expected Int, found Float", attributes={"is_causal": 0.5})
    cases.add("attribute-value", "load", "attribute is_causal: expected 0 or 1, found 2", attributes={"is_causal": 2})
    cases.add("kv-heads-divide", "load", "attribute kv_num_heads", attributes={"kv_num_heads": 3})
    cases.add("kv-heads-unranked", "load", "attribute kv_num_heads", attributes={"kv_num_heads": 3}, dims="unranked")
    cases.add("rank-declared", "load", "input query: expected shape", shapes={"query": [10, HEADS * HEAD_DIM]})
    cases.add("width-declared", "load", "input key: expected shape", shapes={"key": ["batch", "kv_len", 30]})
    cases.add("rank-fed", "run", "input query: expected shape", dims="unranked", wrong_feed={"query": [10, 64]})
    cases.add("rank-17-fed", "run", "expected shape at most 16", dims="unranked", wrong_feed={"value": [1] * 17})
    cases.add("rank-0-fed", "run", "input head_gates: expected shape", dims="unranked", wrong_feed={"head_gates": []})
    cases.add("batch-fed", "run", "input value: expected shape", dims="unranked",
              wrong_feed={"value": [BATCH + 1, KV_LEN, KV_HEADS * VALUE_DIM]})
    cases.add("bias-fed", "run", "input attn_bias: expected shape", dims="unranked", bias=["q_len", "kv_len"],
              wrong_feed={"attn_bias": [Q_LEN, KV_LEN + 1]})
    cases.add("missing-input", "load", drop=["head_gates"])
    cases.add("element-type", "load", types={"query": TensorProto.INT64})
    # 1.17 casts float16 to float32 where a node of mixed types asks for it.
    cases.add("mixed-types", "load run ok", types={"key": TensorProto.FLOAT16})
    cases.add("gates-type", "load run", dtype="f16", types={"head_gates": TensorProto.FLOAT16})
    (cases.folder / "cases.json").write_text(json.dumps(cases.list, indent=1))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
