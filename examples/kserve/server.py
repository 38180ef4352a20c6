"""KServe's Python server for an exported model, such as an image classifier, over the Open Inference Protocol v2.

    python server.py --model_name digits --http_port 8080 vit/model.onnx [libmoh_ops.so]
"""

import argparse
import asyncio

import kserve
import numpy as np
import onnxruntime as ort
from kserve.errors import InvalidInput
from kserve.utils.utils import generate_uuid

TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}


class OnnxModel(kserve.Model):
    """Gives the model's outputs for the request's inputs. Numbers of any type become those of the model's inputs."""

    def __init__(self, name: str, path: str, library: str | None) -> None:
        super().__init__(name)
        options = ort.SessionOptions()
        if library:
            options.register_custom_ops_library(library)
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.ready = True

    async def predict(self, payload: kserve.InferRequest, headers=None, response_headers=None) -> kserve.InferResponse:
        given = {one.name: one for one in payload.inputs}
        feeds = {}
        for port in self.session.get_inputs():
            if port.name not in given:
                raise InvalidInput(f"inputs: expected {port.name}, found {sorted(given)}")
            one = given[port.name]
            if len(one.shape) != len(port.shape) or any(isinstance(b, int) and a != b for a, b in zip(one.shape, port.shape)):
                raise InvalidInput(f"{port.name}: shape {one.shape}, expected {port.shape}")
            try:
                feeds[port.name] = one.as_numpy().reshape(one.shape).astype(TYPES[port.type])
            except (ValueError, TypeError) as error:
                raise InvalidInput(f"{port.name}: {error}") from error
        # In a thread: the server answers health checks meanwhile.
        found = await asyncio.to_thread(self.session.run, None, feeds)
        outputs = []
        for port, values in zip(self.session.get_outputs(), found):
            # JSON has no float16.
            values = values.astype(np.float32) if values.dtype == np.float16 else values
            output = kserve.InferOutput(port.name, list(values.shape), "FP32" if values.dtype == np.float32 else "INT64")
            output.set_data_from_numpy(values, binary_data=False)
            outputs.append(output)
        # A client need not give an id, but KServe's response must have one.
        return kserve.InferResponse(payload.id or generate_uuid(), self.name, outputs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(parents=[kserve.model_server.parser])
    parser.add_argument("model")
    parser.add_argument("library", nargs="?")
    arguments = parser.parse_args()
    kserve.ModelServer().start([OnnxModel(arguments.model_name, arguments.model, arguments.library)])
