"""An exported model's graph with onnxruntime's own fused operators in the place of ours, for comparison.

RoutedAttention becomes MultiHeadAttention or GroupQueryAttention of all heads, times the gates; a cache in place is GroupQueryAttention's.
Routed and quantised products become MatMul and MatMulNBits.
"""

import os

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

LINEAR = ("RoutedProjection", "RoutedCombine")
QUANTISED = ("RoutedProjectionNBits", "RoutedCombineNBits", "LinearNBits", "LinearActivationNBits")
ACTIVATIONS = ("Relu", "Gelu", "Gelu")


class Rewriter:
    """Makes the nodes. `past` tokens come before `length` new ones; GroupQueryAttention gets these numbers as constants."""

    def __init__(self, graph, batch, past, length, dtype):
        self.batch, self.past, self.length = batch, past, length
        self.type = {"f16": TensorProto.FLOAT16, "f32": TensorProto.FLOAT}[dtype]
        self.nodes, self.constants = [], {}
        self.shapes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
        self.updates = {node.output[0]: node for node in graph.node if node.op_type == "CacheUpdate"}
        # Keys and values of rank 4: (batch, KV heads, keys, dim).
        self.cached = any(one.name.startswith("past_key_values") for one in graph.input)
        for node in graph.node:
            self.rewrite(node)

    def add(self, op, inputs, outputs, domain="", **attributes):
        self.nodes.append(helper.make_node(op, inputs, outputs, domain=domain, **attributes))
        return outputs[0]

    def constant(self, name, array):
        self.constants[name] = numpy_helper.from_array(array, name)
        return name

    def rewrite(self, node):
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if node.domain == "ai.moh" and attributes.get("weight_layout", 0) == 0:
            if node.op_type in LINEAR:
                return self.product(node)
            if node.op_type in QUANTISED:
                return self.quantised(node, attributes)
            if node.op_type in ("RoutedAttention", "RoutedCachedAttention"):
                return self.attention(node, attributes)
            if node.op_type == "CacheUpdate":
                return None  # GroupQueryAttention updates the cache
        self.nodes.append(node)
        return None

    def product(self, node):
        name = node.output[0]
        transposed = self.add("Transpose", [node.input[1]], [name + "/W"], perm=[1, 0])
        self.biased("MatMul", [node.input[0], transposed], node.input[3:4], name)

    def quantised(self, node, attributes):
        gates = node.op_type.startswith("Routed")
        x, weight, scales = node.input[:3]
        optional = list(node.input[3 + gates :]) + [""] * 4
        followed = node.op_type in ("RoutedCombineNBits", "LinearNBits")
        bias, gate, residual, zero_points = optional[:4] if followed else (optional[0], "", "", optional[1])
        # Numbers that stand in for absent ones change nothing.
        after = [(op, x) for op, x in (("Mul", gate), ("Add", residual)) if x and not x.startswith("ai.moh/")]
        rows, blocks, _ = self.shapes[weight]
        sizes = {"N": rows, "K": blocks * attributes["block_size"], **attributes}
        sizes.pop("num_heads", None)
        activation = sizes.pop("activation", None)
        output = node.output[0] if activation is None and not after else node.output[0] + "/sum"
        inputs = [x, weight, scales, *([zero_points] if zero_points else [])]
        self.biased("MatMulNBits", inputs, [bias] if bias else [], output, domain="com.microsoft", **sizes)
        for i, (op, other) in enumerate(after):
            output = self.add(op, [output, other], [node.output[0] + "/gated" if i + 1 < len(after) else node.output[0]])
        if activation is not None:
            self.activation(activation, output, node.output[0])

    def activation(self, number, x, output):
        """ReLU, GELU, GELU by tanh, SiLU."""
        if number == 3:
            self.add("Mul", [x, self.add("Sigmoid", [x], [output + "/gate"])], [output])
        else:
            self.add(ACTIVATIONS[number], [x], [output], **({"approximate": "tanh"} if number == 2 else {}))

    def biased(self, op, inputs, bias, output, **attributes):
        found = self.add(op, inputs, [output + "/product" if bias else output], **attributes)
        if bias:
            self.add("Add", [found, bias[0]], [output])

    def attention(self, node, attributes):
        query, key, value, gates = node.input[:4]
        name, heads, kv_heads = node.output[0], attributes["num_heads"], attributes["kv_num_heads"]
        common = {"num_heads": heads, "scale": attributes["scale"], "domain": "com.microsoft"}
        flat = self.constant("moh/flat", np.array([0, 0, -1], np.int64))
        ends = self.constant("moh/ends", np.full(self.batch, self.past + self.length - 1, np.int32))
        total = self.constant("moh/total", np.array(self.past + self.length, np.int32))
        if node.op_type == "RoutedCachedAttention":
            caches = [self.updates[key], self.updates[value]]
            new, old = [update.input[1] for update in caches], [update.input[0] for update in caches]
            outputs = [name + "/all", *(update.output[0] for update in caches)]
            self.add("GroupQueryAttention", [query, *new, *old, ends, total], outputs, kv_num_heads=kv_heads, **common)
        elif self.cached:
            rows = []
            for kind, cache in (("key", key), ("value", value)):
                self.add("Transpose", [cache], [f"{name}/{kind}4"], perm=[0, 2, 1, 3])
                rows.append(self.add("Reshape", [f"{name}/{kind}4", flat], [f"{name}/{kind}3"]))
            outputs = [name + "/all", name + "/k", name + "/v"]
            self.add("GroupQueryAttention", [query, *rows, "", "", ends, total], outputs, kv_num_heads=kv_heads, **common)
        else:
            self.add("MultiHeadAttention", [query, key, value], [name + "/all"], unidirectional=attributes["is_causal"], **common)
        split = self.constant(f"moh/heads{heads}", np.array([0, 0, heads, -1], np.int64))
        self.add("Reshape", [name + "/all", split], [name + "/split"])
        self.add("Cast", [gates], [name + "/gates"], to=self.type)
        self.add("Unsqueeze", [name + "/gates", self.constant("moh/last", np.array([-1], np.int64))], [name + "/weights"])
        self.add("Mul", [name + "/split", name + "/weights"], [name + "/scaled"])
        self.add("Reshape", [name + "/scaled", flat], [name])


def write(path, batch, past, length, dtype):
    """Writes the model beside the one at `path`; returns its path."""
    model = onnx.load(path, load_external_data=False)
    rewriter = Rewriter(model.graph, batch, past, length, dtype)
    del model.graph.node[:]
    model.graph.node.extend(rewriter.nodes)
    model.graph.initializer.extend(rewriter.constants.values())
    if not any(one.domain == "com.microsoft" for one in model.opset_import):
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    path = f"{path.removesuffix('.onnx')}-fused-{past}-{length}.onnx"
    onnx.save(model, path)
    return path
