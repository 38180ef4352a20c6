#!/usr/bin/env python3
"""Parses each config.pbtxt of a Triton model repository, and compares it with the model's inputs and outputs.

usage: check_triton.py REPOSITORY
"""

import sys
from pathlib import Path

import onnxruntime as ort
from common import report
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

TYPES = {
    "tensor(float)": model_config_pb2.TYPE_FP32,
    "tensor(float16)": model_config_pb2.TYPE_FP16,
    "tensor(int64)": model_config_pb2.TYPE_INT64,
}


def check(folder):
    config = text_format.Parse((folder / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    file = folder / "1" / (config.default_model_filename or "model.onnx")
    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    batched = config.max_batch_size > 0
    for ports, found in [(session.get_inputs(), config.input), (session.get_outputs(), config.output)]:
        assert [port.name for port in ports] == [port.name for port in found], folder
        for port, one in zip(ports, found):
            # What Triton's onnxruntime backend compares with the model: the reshaped dimensions, behind the batch.
            dims = list(one.reshape.shape) if one.HasField("reshape") else list(one.dims)
            expected = [dim if isinstance(dim, int) else -1 for dim in port.shape]
            assert ([-1] if batched else []) + dims == expected, (folder, port.name, dims, expected)
            assert one.data_type == TYPES[port.type] and all(one.dims), (folder, port.name)
    assert config.backend == "onnxruntime" and config.HasField("dynamic_batching") == batched
    library = ", ".join(config.model_operations.op_library_filename) or "no library"
    report(f"triton {folder}", True, f"max_batch_size {config.max_batch_size}, {len(config.input)} inputs, {library}")


def main():
    for config in sorted(Path(sys.argv[1]).glob("*/config.pbtxt")):
        check(config.parent)


if __name__ == "__main__":
    main()
