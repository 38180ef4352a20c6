"""Whole models in onnxruntime's CUDA provider: with libmoh_ops, without it, and with onnxruntime's own fused attention.

usage: models.py MOH_EXPORT LIBMOH_OPS PRESETS WORK_FOLDER ROWS.jsonl MODEL [--small]

Weights are random. Each way to run the model is measured if it can be; without the library there is no row. "fused" is the same graph with every RoutedAttention as MultiHeadAttention or GroupQueryAttention of all heads and
a multiplication by the gates, and plain matrix products in the place of routed ones. Inputs and outputs stay on the GPU.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import traceback

import numpy as np
import onnx
import onnxruntime as ort
import targets
from onnx import TensorProto, helper, numpy_helper
from results import Results


def export(program, presets, work, name, preset, changes, dtype):
    """The model file, with random weights; made once."""
    folder = os.path.join(work, f"{name}-{dtype}")
    model = os.path.join(folder, "model.onnx")
    if not os.path.exists(model):
        os.makedirs(folder, exist_ok=True)
        config = json.load(open(os.path.join(presets, preset + ".json"))) | changes
        for key, value in config.items():  # lists hold a number a layer
            if isinstance(value, list) and "depth" in changes and len(value) > changes["depth"]:
                config[key] = value[: changes["depth"]]
        with open(os.path.join(folder, "preset.json"), "w") as file:
            json.dump(config, file)
        weights = os.path.join(folder, "weights")
        run = lambda *command: subprocess.run([program, *command], check=True, stdout=subprocess.DEVNULL)
        run("random", os.path.join(folder, "preset.json"), "-o", weights, "--dtype", dtype, "--force")
        run(weights, "-o", model, "--dtype", dtype, "--no-verify", "--force", "--quiet")
    return model


def fused(path, batch, length, dtype):
    """Writes the model with onnxruntime's fused attention beside it; the lengths that GroupQueryAttention asks for are constants."""
    model = onnx.load(path, load_external_data=False)
    nodes, constants = [], {}

    def constant(name, array):
        constants[name] = numpy_helper.from_array(array, name)
        return name

    for node in model.graph.node:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if node.domain != "ai.moh" or attributes.get("weight_layout", 0) != 0:
            nodes.append(node)
            continue
        (output,), name = node.output, node.output[0]
        add = lambda op, inputs, outputs, domain="", **kw: nodes.append(helper.make_node(op, inputs, outputs, domain=domain, **kw))
        if node.op_type in ("RoutedProjection", "RoutedCombine"):
            add("Transpose", [node.input[1]], [name + "/W"], perm=[1, 0])
            biased = len(node.input) > 3
            add("MatMul", [node.input[0], name + "/W"], [name + "/product" if biased else output])
            if biased:
                add("Add", [name + "/product", node.input[3]], [output])
            continue
        if node.op_type != "RoutedAttention":
            nodes.append(node)
            continue
        query, key, value, gates = node.input[:4]
        heads, kv_heads = attributes["num_heads"], attributes["kv_num_heads"]
        common = {"num_heads": heads, "scale": attributes["scale"], "domain": "com.microsoft"}
        if "past_key_values" in "".join(i.name for i in model.graph.input):  # rank 4: (batch, KV heads, keys, dim)
            flat = []
            for kind, cache in (("key", key), ("value", value)):
                add("Transpose", [cache], [f"{name}/{kind}4"], perm=[0, 2, 1, 3])
                add("Reshape", [f"{name}/{kind}4", constant("moh/flat", np.array([0, 0, -1], np.int64))], [f"{name}/{kind}3"])
                flat.append(f"{name}/{kind}3")
            ends = constant("moh/ends", np.full(batch, length - 1, np.int32))
            total = constant("moh/total", np.array(length, np.int32))
            add("GroupQueryAttention", [query, *flat, "", "", ends, total], [name + "/all", name + "/k", name + "/v"], kv_num_heads=kv_heads, **common)
        else:
            add("MultiHeadAttention", [query, key, value], [name + "/all"], unidirectional=attributes["is_causal"], **common)
        add("Reshape", [name + "/all", constant(f"moh/heads{heads}", np.array([0, 0, heads, -1], np.int64))], [name + "/split"])
        add("Cast", [gates], [name + "/gates"], to=TensorProto.FLOAT16 if dtype == "f16" else TensorProto.FLOAT)
        add("Unsqueeze", [name + "/gates", constant("moh/last", np.array([-1], np.int64))], [name + "/weights"])
        add("Mul", [name + "/split", name + "/weights"], [name + "/scaled"])
        add("Reshape", [name + "/scaled", constant("moh/flat", np.array([0, 0, -1], np.int64))], [output])
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(constants.values())
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    path = os.path.join(os.path.dirname(path), "fused.onnx")
    onnx.save(model, path)
    return path


def session(path, library, providers, profile=None):
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if library:
        options.register_custom_ops_library(library)
    if profile:
        options.enable_profiling, options.profile_file_prefix = True, profile
    made = ort.InferenceSession(path, options, providers=providers)
    if made.get_providers()[0] != providers[0]:
        raise RuntimeError(f"onnxruntime runs {os.path.basename(path)} on {made.get_providers()}")
    return made


def bound(made, feeds, device):
    """A function that runs the session on inputs and outputs that stay on the device, and waits."""
    binding = made.io_binding()
    for name, array in feeds.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array, device, 0))
    for output in made.get_outputs():
        binding.bind_output(output.name, device)
    return lambda: made.run_with_iobinding(binding), binding


def kernels_of(path, library, providers, feeds, work):
    """Which operators of ai.moh ran on which provider."""
    made = session(path, library, providers, os.path.join(work, "profile"))
    run, _ = bound(made, feeds, "cuda" if "CUDA" in providers[0] else "cpu")
    run()
    profile = made.end_profiling()
    events = [event.get("args", {}) for event in json.load(open(profile))]
    os.remove(profile)
    found = {(a["op_name"], a["provider"].removesuffix("ExecutionProvider")) for a in events if a.get("op_name", "").startswith(("Routed", "TopKRouter"))}
    return ", ".join(sorted(f"{op} on {provider}" for op, provider in found)) or "none"


def llama_feeds(config, batch, length, dtype):
    tokens = np.random.default_rng(1).integers(0, config["vocab_size"], (batch, length))
    feeds = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "position_ids": np.tile(np.arange(length), (batch, 1))}
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for layer in range(config["num_hidden_layers"]):
        for kind in ("key", "value"):
            feeds[f"past_key_values.{layer}.{kind}"] = np.zeros((batch, config["num_key_value_heads"], 0, width), dtype)
    return feeds


def dit_feeds(config, batch, length, dtype):
    random = np.random.default_rng(1)
    size = config["input_size"]
    return {
        "hidden_states": random.standard_normal((batch, config["in_channels"], size, size)).astype(dtype),
        "timestep": random.uniform(0, 1000, batch).astype(np.float32),
        "class_labels": random.integers(0, config["num_classes"], batch),
    }


SMALL_LLAMA = {
    "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2,
}  # fmt: skip
# name: (what it is, preset, changes, feeds, batch, tokens), and the same cut down, to try this script
MODELS = {
    "dit": ("dit-xl-75, 4096 tokens", "moh-dit-xl-75", {"input_size": 128}, dit_feeds, 2, 4096),
    "llama": ("llama3-8b, 4 layers, prefill of 8192", "moh-llama3-8b", {"num_hidden_layers": 4}, llama_feeds, 1, 8192),
}
SMALL = {
    "dit": ("dit-s-75, 64 tokens", "moh-dit-s-75", {"input_size": 16, "depth": 2}, dit_feeds, 2, 64),
    "llama": ("llama3-8b cut down, prefill of 32", "moh-llama3-8b", SMALL_LLAMA, llama_feeds, 1, 32),
}


def measure(options, title, preset, changes, make_feeds, batch, length):
    """The fields of the model's row."""
    dtype = "f16" if options.gpu else "f32"  # onnxruntime's fused attention for the CPU has no float16
    path = export(options.export, options.presets, options.work, options.model, preset, changes, dtype)
    config = json.load(open(os.path.join(os.path.dirname(path), "preset.json")))
    feeds, providers = make_feeds(config, batch, length, np.float16 if options.gpu else np.float32), [options.provider]
    device = "cuda" if options.gpu else "cpu"
    ways = {
        "ours": lambda: session(path, options.library, providers),
        "body": lambda: session(path, None, providers),
        "fused": lambda: session(fused(path, batch, length, dtype), None, providers),
    }
    runs, first, missing = {}, {}, {}
    for kind, make in ways.items():
        try:
            run, binding = bound(make(), feeds, device)
            for _ in range(3):
                run()
            first[kind], runs[kind] = binding.get_outputs()[0].numpy().astype(np.float64), run
        except Exception as error:  # noqa: BLE001
            if kind == "ours":
                raise
            missing[kind] = str(error).splitlines()[0][:300]
    distance = lambda a, b: float(np.linalg.norm(first[a] - first[b]) / max(np.linalg.norm(first[b]), 1e-30))
    times = {kind: [] for kind in runs}
    for _ in range(9):
        for kind, run in runs.items():
            start = time.perf_counter()
            run()
            times[kind].append((time.perf_counter() - start) * 1e3)
    ms = {kind: {"median": statistics.median(x), "min": min(x), "max": max(x)} for kind, x in times.items()}
    fields = {"name": title, "status": "ok", "missing": missing, "batch": batch, "kernels": kernels_of(path, options.library, providers, feeds, options.work)}
    fields |= {"distances": {kind: distance("ours", kind) for kind in runs if kind != "ours"}}
    fields["error"] = fields["distances"].get("body")
    if options.gpu and (" on CPU" in fields["kernels"] or fields["kernels"] == "none"):
        return fields | {"status": "FAILED", "reason": f"not on the GPU: {fields['kernels']}"}
    # In float16 a few tokens in ten thousand are routed to other heads, which moves their outputs.
    if not np.isfinite(first["ours"]).all() or not min(fields["distances"].values(), default=0) <= 0.1:
        return fields | {"status": "WRONG", "reason": f"relative distances {fields['distances']}"}
    ratio = ms["ours"]["median"] / ms["fused"]["median"] if "fused" in ms else None
    must, goal = targets.MODELS
    fields |= {"ms": ms, "ratio": ratio, "target": "models", "must": must, "goal": goal}
    fields["verdict"] = targets.verdict(ratio, must, goal) if ratio else "no peer"
    if not options.gpu:
        fields |= {"status": "dry run", "ms": dict.fromkeys(ms, "dry run"), "ratio": "dry run", "verdict": "dry run"}
    return fields


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for argument in ("export", "library", "presets", "work", "results"):
        parser.add_argument(argument)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--stage", default="")
    parser.add_argument("--name", help="the part's name in the results")
    parser.add_argument("--small", action="store_true", help="models of a moment, on whatever device: to try this script")
    parser.add_argument("--provider", default="CUDAExecutionProvider")
    options = parser.parse_args()
    options.gpu = options.provider == "CUDAExecutionProvider"
    if options.gpu and hasattr(ort, "preload_dlls"):
        ort.preload_dlls()
    results = Results(options.results, stage=options.stage, part=options.name or options.model)
    results.add("machine", machine={"onnxruntime": ort.__version__, "from": os.path.dirname(ort.__file__), "providers": ort.get_available_providers()})
    model = (SMALL if options.small else MODELS)[options.model]
    try:
        fields = measure(options, *model)
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        fields = {"name": model[0], "status": "FAILED", "reason": f"{type(error).__name__}: {error}"[:500]}
    results.add("row", **fields)
    print(fields)
    sys.exit(1 if fields["status"] in ("FAILED", "WRONG") else 0)


if __name__ == "__main__":
    main()
