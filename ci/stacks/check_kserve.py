#!/usr/bin/env python3
"""Classifies the held-out digits with KServe's Python server (examples/kserve/server.py) over V2 REST, and sends it bad requests.

usage: check_kserve.py VIT [LIBRARY]
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import requests
from common import ROOT, digits, report

PORT = 18080
URL = f"http://127.0.0.1:{PORT}/v2/models/digits"


def pixels(pictures):
    """(pictures, channels, height, width), from -1 to 1."""
    return np.stack([np.asarray(one, np.float32).transpose(2, 0, 1) / 127.5 - 1 for one in pictures])


def request(values, **changes):
    tensor = {"name": "pixel_values", "datatype": "FP32", "shape": list(values.shape), "data": values.ravel().tolist()}
    return {"inputs": [{**tensor, **changes}]}


def infer(body):
    return requests.post(f"{URL}/infer", json=body, timeout=60)


def accuracy(pictures, labels):
    right = 0
    for start in range(0, len(labels), 33):
        answer = infer(request(pixels(pictures[start : start + 33]))).json()
        (logits,) = answer["outputs"]
        found = np.array(logits["data"]).reshape(logits["shape"]).argmax(1)
        right += int((found == labels[start : start + 33]).sum())
    report("kserve", right / len(labels) > 0.99, f"{right} of {len(labels)} held-out digits")


def bad_requests(picture):
    good = request(pixels([picture]))
    cases = [
        {},
        {"inputs": []},
        request(pixels([picture]), name="pixels"),
        request(pixels([picture]), shape=[1, 3, 32, 32]),
        request(pixels([picture]), shape=[2, 3, 64, 64]),
        request(pixels([picture]), shape=[3, 64, 64]),
        request(pixels([picture]), datatype="FP33"),
        request(pixels([picture]), data=["a"]),
    ]
    for body in cases:
        answer = infer(body)
        if answer.status_code not in (400, 422):
            report("kserve bad requests", False, f"{str(body)[:200]}: {answer.status_code} {answer.text[:300]}")
    unknown = requests.post(URL.replace("digits", "unknown") + "/infer", json=good, timeout=60)
    passed = unknown.status_code == 404 and infer(good).status_code == 200
    report("kserve bad requests", passed, f"{len(cases)} refused with 400 or 422, an unknown model with {unknown.status_code}")


def main():
    server = ROOT / "examples/kserve/server.py"
    options = ["--model_name", "digits", "--http_port", str(PORT), "--enable_grpc", "false"]
    model = [str(Path(sys.argv[1]) / "model.onnx"), *sys.argv[2:]]
    pictures, labels = digits()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([sys.executable, server, *options, *model], stdout=log, stderr=log)
        try:
            for _ in range(120):
                try:
                    if requests.get(f"{URL}/ready", timeout=5).ok:
                        break
                except requests.ConnectionError:
                    time.sleep(0.5)
            else:
                log.seek(0)
                report("kserve", False, log.read().decode(errors="replace")[-2000:])
            accuracy(pictures, np.array(labels))
            bad_requests(pictures[0])
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
