"""Tries tools of others on exported models: what still runs, and whether our kernels do.

usage: tools.py MOH-EXPORT LIBRARY FOLDER [--check PAGE.md]      (needs the packages that ci/stacks.sh installs)

Exports the models into FOLDER, runs each tool on each, and each result with the library and without. Prints a table: in a cell, "runs" is
the result without the library, "kernels" the one with it where the profile names an operator of ours. Both mean that its numbers are those
of the exported model. With --check the table must be the one in the page.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from common import CHECKPOINTS, ROOT, greedy

LLAMA, VIT, DIT = (CHECKPOINTS / name for name in ("shakespeare-moh-llama", "digits-moh-vit", "digits-moh-dit"))
INT8, INT4 = (["--quantize", bits] for bits in ("int8", "int4"))
# Name: checkpoint, options of the export.
MODELS = {
    "llama": (LLAMA, []),
    "vit": (VIT, ["--dtype", "f32"]),
    "dit": (DIT, []),
    "llama in place": (LLAMA, ["--cache", "in-place"]),
    "llama int8 qdq": (LLAMA, [*INT8, "--form", "qdq"]),
    "llama int8 nbits": (LLAMA, [*INT8, "--form", "nbits"]),
    "llama int4 moh": (LLAMA, [*INT4, "--form", "moh"]),
}
# As large as the outputs' own error may be, relative to their root mean square.
EXACT, HALF, EIGHT_BITS = 1e-4, 1e-2, 0.15
# Where onnxruntime rounds activations to 8 bits, as it does for DequantizeLinear with VNNI, a last bit becomes a step of that rounding.
STEPS = {"llama int8 qdq": 1e-2}


def ours(model):
    """The types of our operators in a model."""
    return sorted({node.op_type for node in model.graph.node if node.domain == "ai.moh"})


def onnxslim(source, output):
    subprocess.run([sys.executable, "-m", "onnxslim", source, output], check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def onnxsim(source, output):
    subprocess.run([sys.executable, "-m", "onnxsim", source, output], check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def quantize_dynamic(source, output):
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(source, output)


def quant_pre_process(source, output):
    from onnxruntime.quantization.shape_inference import quant_pre_process

    # Its optimisation looks for the weights in a folder of its own, and its symbolic shape inference knows ONNX's operators only.
    quant_pre_process(source, output, skip_optimization=True, skip_symbolic_shape=True)


def converter_common(source, output):
    from onnxconverter_common import float16

    model = onnx.load(source)
    # With the type Cast in its list of operators the converter never ends.
    casts = [node.name for node in model.graph.node if node.op_type == "Cast"]
    blocked = float16.DEFAULT_OP_BLOCK_LIST + ours(model)
    onnx.save(float16.convert_float_to_float16(model, keep_io_types=True, op_block_list=blocked, node_block_list=casts), output)


def transformers_float16(source, output):
    from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16

    model = onnx.load(source)
    half = convert_float_to_float16(model, keep_io_types=True, op_block_list=[*DEFAULT_OP_BLOCK_LIST, *ours(model)])
    # A value that two of our nodes use gets the same Cast twice.
    nodes = {node.name: node for node in half.graph.node}
    del half.graph.node[:]
    half.graph.node.extend(nodes.values())
    onnx.save(half, output)


def transformers_optimizer(source, output):
    from onnxruntime.transformers.optimizer import optimize_model

    optimize_model(source, model_type="bert", opt_level=0).save_model_to_file(output)


def offline(source, output, library=None):
    options = session_options(library)
    # ORT_ENABLE_ALL would optimise for this processor alone.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = output
    weights = "session.optimized_model_external_initializers_"
    options.add_session_config_entry(weights + "file_name", os.path.basename(output) + "_data")
    options.add_session_config_entry(weights + "min_size_in_bytes", "1024")
    ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def checker(source, output):
    onnx.checker.check_model(source, full_check=True)
    onnx.save(onnx.shape_inference.infer_shapes(onnx.load(source), check_type=True, strict_mode=True, data_prop=True), output)


def tools(library):
    """Name as the table has it: the tool, and the error that it may bring."""
    return {
        "onnx: checker, strict shape inference": (checker, EXACT),
        "onnxslim": (onnxslim, EXACT),
        "onnxsim": (onnxsim, EXACT),
        "`quantize_dynamic`": (quantize_dynamic, EIGHT_BITS),
        "`quant_pre_process`": (quant_pre_process, EXACT),
        "onnxconverter-common float16": (converter_common, HALF),
        "`onnxruntime.transformers.float16`": (transformers_float16, HALF),
        "`onnxruntime.transformers.optimizer`": (transformers_optimizer, EXACT),
        "`optimized_model_filepath`, without the library": (offline, EXACT),
        "`optimized_model_filepath`, with the library": (lambda source, output: offline(source, output, library), EXACT),
    }


def session_options(library):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if library:
        options.register_custom_ops_library(library)
    return options


def example(model):
    """Inputs of a model: the language model gets the text that it was trained to write."""
    rng, sizes, feeds = np.random.default_rng(0), {"batch": 2, "past": 0}, {}
    for port in ort.InferenceSession(model, session_options(None), providers=["CPUExecutionProvider"]).get_inputs():
        shape = [size if isinstance(size, int) else sizes.get(size, 32) for size in port.shape]
        if port.name == "attention_mask":
            feeds[port.name] = np.ones(shape, np.int64)
        elif port.name == "position_ids":
            feeds[port.name] = np.broadcast_to(np.arange(shape[1]), shape)
        elif port.name == "input_ids":
            feeds[port.name] = np.resize(greedy()[1], shape)
        elif port.name == "class_labels":
            feeds[port.name] = rng.integers(0, 10, shape)
        else:
            feeds[port.name] = rng.standard_normal(shape, dtype=np.float32)
    return feeds


def run(model, feeds, library):
    """The outputs, and whether a kernel of ours ran."""
    options = session_options(library)
    options.enable_profiling = True
    options.profile_file_prefix = f"{model}-profile"
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    outputs = session.run(None, feeds)
    profile = Path(session.end_profiling())
    ran = {event["args"]["op_name"] for event in json.loads(profile.read_text()) if event["name"].endswith("_kernel_time")}
    profile.unlink()
    return outputs, any(re.match("Routed|TopKRouter|HeadLinear|Linear(Activation)?NBits|CacheUpdate|Aggregated", name) for name in ran)


def reason(error):
    """The line of an exception, or of a program's output, that says most."""
    text = error.stdout.decode(errors="replace") if isinstance(error, subprocess.CalledProcessError) else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{type(error).__name__}: {(lines or [''])[-1][:300]}"


def differs(found, expected, tolerance):
    """Why outputs are not those expected; None where they are."""
    pairs = [(x.astype(np.float64), y.astype(np.float64)) for x, y in zip(found, expected) if y.size]
    error = max(np.sqrt(((x - y) ** 2).mean() / (y**2).mean()) for x, y in pairs)
    return None if error <= tolerance else f"error {error:.2g}"


def cell(tool, max(tolerance, STEPS.get(model, 0)), source, output, feeds, expected, library):
    """What a cell of the table says, and why."""
    try:
        tool(source, output)
    except Exception as error:
        return "refused", [reason(error)]
    said, why = [], []
    for name, with_library in (("runs", None), ("kernels", library)):
        try:
            found, ran = run(output, feeds, with_library)
            wrong = differs(found, expected, tolerance)
        except Exception as error:
            wrong, ran = reason(error), False
        if wrong:
            why.append(f"{name}: {wrong}")
        elif ran == bool(with_library):
            said.append(name)
    return ", ".join(said) or "no", why


def main():
    arguments = sys.argv[1:]
    page = None
    if len(arguments) == 5 and arguments[3] == "--check":
        page = Path(arguments[4]).resolve()
    elif len(arguments) != 3:
        sys.exit(__doc__)
    exporter, library, folder = (os.path.abspath(path) for path in arguments[:3])
    rows = {name: [] for name in tools(library)}
    for model, (checkpoint, options) in MODELS.items():
        home = Path(folder) / model.replace(" ", "-")
        shutil.rmtree(home, ignore_errors=True)
        source = str(home / "model.onnx")
        subprocess.run([exporter, checkpoint, "-o", source, "--quiet", *options], check=True)
        feeds = example(source)
        expected, _ = run(source, feeds, None)
        # Some tools leave files in the current folder.
        os.chdir(home)
        for number, (name, (tool, tolerance)) in enumerate(tools(library).items()):
            # The weights of some results are found beside the model.
            said, why = cell(tool, max(tolerance, STEPS.get(model, 0)), source, str(home / f"{number}.onnx"), feeds, expected, library)
            rows[name].append(said)
            print(f"{name}; {model}: {said}", *why, sep="\n    ", file=sys.stderr, flush=True)
    lines = [f"| | {' | '.join(MODELS)} |", "|---" * (len(MODELS) + 1) + "|"]
    table = "\n".join(lines + [f"| {name} | {' | '.join(row)} |" for name, row in rows.items()]) + "\n"
    print(table)
    if page and table not in page.read_text(encoding="utf-8"):
        sys.exit(f"tools: the table in {page.relative_to(ROOT) if page.is_relative_to(ROOT) else page} is another one")


if __name__ == "__main__":
    main()
