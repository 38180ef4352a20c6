"""Whole models in onnxruntime's CUDA provider: with libmoh_ops, without it, and with onnxruntime's own fused operators.

usage: models.py MOH_EXPORT LIBMOH_OPS PRESETS WORK_FOLDER ROWS.jsonl MODEL [--small]

Weights are random. Each way to run the model is measured if it can be; without the library there is no row. "fused" is what fused.py makes
of the same graph, in which onnxruntime runs the bodies of dense layers and norms: products, and sums after them. "gemm" is what it makes of a graph
with ONNX's own dense layers, which are Gemm with a bias. The ratio is to the faster of the two. Inputs and outputs stay on the GPU; a cache in place
is one buffer, bound as past and present.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
import traceback

import fused
import numpy as np
import onnxruntime as ort
import targets
from results import Results


@dataclasses.dataclass
class Model:
    """A model and its call: `tokens` tokens of each sequence after `past` others. capacity: of a cache in place, for int4 weights.

    heads: how projections into heads and out of them are written, see moh-export --head-layers.
    """

    title: str
    preset: str
    changes: dict
    batch: int
    tokens: int
    past: int = 0
    capacity: int = 0
    heads: str = "dense"


def export(program, presets, work, m, dtype, style="moh"):
    """The model file, with random weights; made once. style: how dense layers and norms are written."""
    in_int4 = m.capacity > 0
    folder = os.path.join(work, f"{m.preset}-{'int4-' if in_int4 else ''}{dtype}")
    model, weights = os.path.join(folder, f"{m.heads}-{style}.onnx"), os.path.join(folder, "weights")
    run = lambda *command: subprocess.run([program, *command], check=True, stdout=subprocess.DEVNULL)
    if not os.path.exists(weights):
        os.makedirs(folder, exist_ok=True)
        config = json.load(open(os.path.join(presets, m.preset + ".json"))) | m.changes
        for key, value in config.items():  # lists hold a number a layer
            if isinstance(value, list) and "depth" in m.changes and len(value) > m.changes["depth"]:
                config[key] = value[: m.changes["depth"]]
        with open(os.path.join(folder, "preset.json"), "w") as file:
            json.dump(config, file)
        run("random", os.path.join(folder, "preset.json"), "-o", weights, "--dtype", dtype, "--force")
    if not os.path.exists(model):
        kind = ["--quantize", "int4"] if in_int4 else ["--cache", "concat"] if "llama" in m.preset else []
        styles = ["--head-layers", m.heads, "--dense-layers", style, "--norms", style]
        run(weights, "-o", model, "--for", "ort-cuda", "--bare", "--dtype", dtype, *styles, *kind, "--no-verify", "--force", "--quiet")
    return model


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
    values = {name: ort.OrtValue.ortvalue_from_numpy(array, device, 0) for name, array in feeds.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for output in made.get_outputs():
        cache = values.get(output.name.replace("present", "past_key_values"))
        if cache is not None and cache.shape()[2] > 0:
            binding.bind_ortvalue_output(output.name, cache)
        else:
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
    ours = ("Routed", "TopKRouter", "CacheUpdate", "Linear", "LayerNorm", "DepthwiseConv")
    found = {(a["op_name"], a["provider"].removesuffix("ExecutionProvider")) for a in events if a.get("op_name", "").startswith(ours) and a["op_name"] != "LayerNormalization"}
    return ", ".join(sorted(f"{op} on {provider}" for op, provider in found)) or "none"


def llama_feeds(config, m, dtype):
    random = np.random.default_rng(1)
    tokens = random.integers(0, config["vocab_size"], (m.batch, m.tokens))
    positions = np.tile(np.arange(m.past, m.past + m.tokens), (m.batch, 1))
    feeds = {"input_ids": tokens, "attention_mask": np.ones((m.batch, m.past + m.tokens), np.int64), "position_ids": positions}
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for layer in range(config["num_hidden_layers"]):
        for kind in ("key", "value"):
            cache = random.standard_normal((m.batch, config["num_key_value_heads"], m.capacity, width), np.float32)
            feeds[f"past_key_values.{layer}.{kind}"] = cache.astype(dtype)
    return feeds


def dit_feeds(config, m, dtype):
    random = np.random.default_rng(1)
    size = config["input_size"]
    return {
        "hidden_states": random.standard_normal((m.batch, config["in_channels"], size, size)).astype(dtype),
        "timestep": random.uniform(0, 1000, m.batch).astype(np.float32),
        "class_labels": random.integers(0, config["num_classes"], m.batch),
    }


LLAMA, INT4 = {"num_hidden_layers": 4}, {"num_hidden_layers": 4, "vocab_size": 32000}
SMALL_LLAMA = {
    "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2,
}  # fmt: skip
MODELS = {
    "dit": Model("dit-xl-75, 4096 tokens", "moh-dit-xl-75", {"input_size": 128}, 2, 4096),
    "dit-routed": Model("dit-xl-75, 4096 tokens, routed projections", "moh-dit-xl-75", {"input_size": 128}, 2, 4096, heads="routed"),
    "llama": Model("llama3-8b, 4 layers, prefill of 8192", "moh-llama3-8b", LLAMA, 1, 8192),
    "llama-routed": Model("llama3-8b, 4 layers, prefill of 8192, routed projections", "moh-llama3-8b", LLAMA, 1, 8192, heads="routed"),
    "llama-int4": Model("llama3-8b int4, 4 layers, one token after 1024", "moh-llama3-8b", INT4, 1, 1, 1024, 4160),
    "llama-int4-long": Model("llama3-8b int4, 4 layers, one token after 4096", "moh-llama3-8b", INT4, 1, 1, 4096, 4160),
    "llama-int4-prompt": Model("llama3-8b int4, 4 layers, prefill of 512", "moh-llama3-8b", INT4, 1, 512, 0, 4160),
}
# The same cut down, to try this script.
SMALL = {
    "dit": Model("dit-s-75, 64 tokens", "moh-dit-s-75", {"input_size": 16, "depth": 2}, 2, 64),
    "dit-routed": Model("dit-s-75, 64 tokens, routed projections", "moh-dit-s-75", {"input_size": 16, "depth": 2}, 2, 64, heads="routed"),
    "llama": Model("llama3-8b cut down, prefill of 32", "moh-llama3-8b", SMALL_LLAMA, 1, 32),
    "llama-routed": Model("llama3-8b cut down, prefill of 32, routed projections", "moh-llama3-8b", SMALL_LLAMA, 1, 32, heads="routed"),
    "llama-int4": Model("llama3-8b int4 cut down, one token after 20", "moh-llama3-8b", SMALL_LLAMA, 1, 1, 20, 64),
    "llama-int4-long": Model("llama3-8b int4 cut down, one token after 63", "moh-llama3-8b", SMALL_LLAMA, 1, 1, 63, 64),
    "llama-int4-prompt": Model("llama3-8b int4 cut down, prefill of 40", "moh-llama3-8b", SMALL_LLAMA, 1, 40, 0, 64),
}


def measure(options, m):
    """The fields of the model's row."""
    dtype = "f16" if options.gpu else "f32"  # onnxruntime's fused attention for the CPU has no float16
    path, gemm = (export(options.export, options.presets, options.work, m, dtype, style) for style in ("moh", "onnx"))
    config = json.load(open(os.path.join(os.path.dirname(path), "preset.json")))
    make_feeds = dit_feeds if "input_size" in config else llama_feeds
    feeds, providers = make_feeds(config, m, np.float16 if options.gpu else np.float32), [options.provider]
    device = "cuda" if options.gpu else "cpu"
    ways = {
        "ours": lambda: session(path, options.library, providers),
        "body": lambda: session(path, None, providers),
        "fused": lambda: session(fused.write(path, m.batch, m.past, m.tokens, dtype), None, providers),
        "gemm": lambda: session(fused.write(gemm, m.batch, m.past, m.tokens, dtype), None, providers),
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
    fields = {"name": m.title, "status": "ok", "missing": missing, "batch": m.batch, "kernels": kernels_of(path, options.library, providers, feeds, options.work)}
    fields |= {"distances": {kind: distance("ours", kind) for kind in runs if kind != "ours"}}
    fields["error"] = fields["distances"].get("body")
    if options.gpu and (" on CPU" in fields["kernels"] or fields["kernels"] == "none"):
        return fields | {"status": "FAILED", "reason": f"not on the GPU: {fields['kernels']}"}
    if not fields["distances"]:
        return fields | {"status": "FAILED", "reason": f"nothing to compare with: {missing}"}
    if not np.isfinite(first["ours"]).all() or not targets.agree(fields["distances"]):
        return fields | {"status": "WRONG", "reason": f"relative distances {fields['distances']}"}
    peers = [ms[kind]["median"] for kind in ("fused", "gemm") if kind in ms]
    ratio = ms["ours"]["median"] / min(peers) if peers else None
    fields |= {"ms": ms, "ratio": ratio}
    if target := targets.MODELS.get(options.model):
        fields |= dict(zip(["target", "must", "goal"], ["models", *target], strict=True))
        fields["verdict"] = targets.verdict(ratio, *target) if ratio else "no peer"
    if not options.gpu:
        fields |= {"status": "dry run", "ms": dict.fromkeys(ms, "dry run"), "ratio": "dry run", "verdict": "dry run" if target else None}
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
        fields = measure(options, model)
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        fields = {"name": model.title, "status": "FAILED", "reason": f"{type(error).__name__}: {error}"[:500]}
    results.add("row", **fields)
    print(fields)
    sys.exit(1 if fields["status"] in ("FAILED", "WRONG") else 0)


if __name__ == "__main__":
    main()
