"""Steps of ci/load-times.sh.

usage: load_times.py bare MODEL OUTPUT          writes the model's matrices as bare MatMuls, on the same data file
       load_times.py time MODEL LIBRARY BARE    prints seconds: without the library, with it, the bare model
"""

import sys
import time


def bare(model, output):
    import onnx
    from onnx import helper

    graph = onnx.load(model, load_external_data=False).graph
    weights = [w for w in graph.initializer if len(w.dims) == 2 and w.data_location == onnx.TensorProto.EXTERNAL]
    nodes, inputs, outputs = [], [], []
    for i, weight in enumerate(weights):
        nodes.append(helper.make_node("MatMul", [f"x{i}", weight.name], [f"y{i}"]))
        inputs.append(helper.make_tensor_value_info(f"x{i}", weight.data_type, ["rows", weight.dims[0]]))
        outputs.append(helper.make_tensor_value_info(f"y{i}", weight.data_type, ["rows", weight.dims[1]]))
    graph = helper.make_graph(nodes, "bare", inputs, outputs, weights)
    written = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    with open(output, "wb") as file:
        file.write(written.SerializeToString())


def seconds(model, library=None):
    import onnxruntime

    shortest = float("inf")
    for _ in range(3):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        if library:
            options.register_custom_ops_library(library)
        began = time.perf_counter()
        onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        shortest = min(shortest, time.perf_counter() - began)
    return f"{shortest:.2f}"


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["bare", model, output]:
            bare(model, output)
        case ["time", model, library, matrices]:
            print(seconds(model), seconds(model, library), seconds(matrices), sep=" | ")
        case _:
            sys.exit(__doc__)
