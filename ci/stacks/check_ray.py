#!/usr/bin/env python3
"""Runs examples/ray with exported models: Ray Serve with bad requests, overload and a killed replica, and Ray Data.

usage: check_ray.py LLAMA VIT [LIBRARY]
"""

import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray
import requests
import yaml
from common import CHECKPOINTS, ROOT, digits, equal, greedy, report
from PIL import Image
from ray.serve.schema import ServeDeploySchema

EXAMPLE = ROOT / "examples/ray"
PORT = 18000
URL = f"http://127.0.0.1:{PORT}"
CLIENTS = 16
# Fewer than examples/ray/serve.yaml has, so that a check reaches them.
LIMITS = {"max_requests": 40, "deadline_s": 20}


def post(path, body, session=requests):
    body = body if isinstance(body, bytes) else json.dumps(body)
    return session.post(URL + path, data=body, timeout=60)


def replicas(dashboard, deployment):
    """The processes of a deployment's running replicas."""
    application = requests.get(f"http://{dashboard}/api/serve/applications/", timeout=10).json()["applications"]["moh"]
    found = application["deployments"].get(deployment, {}).get("replicas", [])
    return [replica["pid"] for replica in found if replica["state"] == "RUNNING"]


def wait(what, seconds=90):
    """Waits until the function returns something."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if found := what():
                return found
        except (requests.RequestException, KeyError):
            pass
        time.sleep(0.2)
    return None


def start(folder, llama, vit, library, address):
    """Runs serve.yaml with these models."""
    config = yaml.safe_load((EXAMPLE / "serve.yaml").read_text())
    config["http_options"].update(host="127.0.0.1", port=PORT)
    arguments = config["applications"][0]["args"]
    arguments.update(text=llama, images=vit, max_replicas=2, **LIMITS)
    if library:
        arguments["library"] = library
    (folder / "serve.yaml").write_text(yaml.safe_dump(config))
    command = [Path(sys.executable).parent / "serve", "run", "--address", address, "--app-dir", EXAMPLE, folder / "serve.yaml"]
    with open(folder / "serve.log", "wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def kuberay():
    """The cluster's file describes the same application as serve.yaml."""
    service = yaml.safe_load((EXAMPLE / "kuberay.yaml").read_text())
    there = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    here = ServeDeploySchema.model_validate(yaml.safe_load((EXAMPLE / "serve.yaml").read_text()))
    same = [one.applications[0].import_path for one in (here, there)]
    report("ray kuberay.yaml", service["kind"] == "RayService" and same[0] == same[1], f"a RayService of {same[1]}")


def texts(pool):
    prompt, expected = greedy()
    count = len(expected) - 7
    for given in prompt, expected[:7]:
        answer = post("/completions", {"prompt": given, "max_tokens": count}).json()
        equal(f"ray prompt as {type(given).__name__}", expected[:7] + answer["token_ids"], expected)
    lengths = range(7, 7 + 2 * CLIENTS)
    requests_ = [{"prompt": expected[:n], "max_tokens": 60} for n in lengths]
    answers = list(pool.map(lambda body: post("/completions", body).json()["token_ids"], requests_))
    right = sum(found == expected[n : n + 60] for n, found in zip(lengths, answers))
    report("ray batches", right == len(lengths), f"{right} of {len(lengths)} prompts of different lengths as PyTorch continues them")


def png(picture):
    encoded = io.BytesIO()
    picture.save(encoded, "PNG")
    return encoded.getvalue()


def accuracy(pool):
    pictures, labels = digits()
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    found = pool.map(lambda picture: post("/classify", png(picture)).json()["classes"][0]["label"], pictures)
    right = sum(name == names[label] for name, label in zip(found, labels))
    report("ray classify", right / len(labels) > 0.99, f"{right} of {len(labels)} held-out digits")


def bad_requests():
    digit = png(Image.new("L", (64, 64)))
    cases = [
        (400, "/completions", b"{"),
        (400, "/completions", b"\xff\xfe"),
        (422, "/completions", []),
        (422, "/completions", {"prompt": [[1, 2]]}),
        (422, "/completions", {"prompt": [1.5]}),
        (422, "/completions", {"prompt": []}),
        (422, "/completions", {"prompt": [512]}),
        (422, "/completions", {"prompt": "a", "max_tokens": 0}),
        (422, "/completions", {"prompt": "a", "max_tokens": 512}),
        (422, "/completions", {"prompt": "a", "temperature": 1}),
        (413, "/completions", b" " * (1 << 20) + b"{}"),
        (400, "/classify", b""),
        (400, "/classify", b"no picture"),
        (400, "/classify", digit[:50]),
        (422, "/classify", png(Image.new("L", (2000, 1)))),
        (413, "/classify", png(Image.new("1", (5000, 5000)))),
        (413, "/classify", bytes(11 << 20)),
        (404, "/nothing", b""),
    ]
    for status, path, body in cases:
        answer = post(path, body)
        if answer.status_code != status or "detail" not in answer.json():
            report("ray bad requests", False, f"{path} {body[:40]}: {answer.status_code} {answer.text[:200]}, expected {status}")
    report("ray bad requests", True, f"{len(cases)} refused as they should be")


def overload():
    with ThreadPoolExecutor(2 * LIMITS["max_requests"]) as pool:
        body = {"prompt": "ROMEO:\n", "max_tokens": 100}
        answers = list(pool.map(lambda _: post("/completions", body), range(2 * LIMITS["max_requests"])))
    served = [answer.json()["text"] for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429 and answer.headers["Retry-After"]]
    passed = len(served) + len(refused) == len(answers) and len(set(served)) == 1 and len(refused) > 0
    report("ray overload", passed, f"{len(served)} of {len(answers)} requests at once answered, {len(refused)} refused with 429")


def hang(dashboard):
    """Replicas that do not answer: 503 at the deadline."""
    stopped = replicas(dashboard, "Text")
    for process in stopped:
        os.kill(process, signal.SIGSTOP)
    begin = time.monotonic()
    answer = post("/completions", {"prompt": "a"})
    seconds = time.monotonic() - begin
    for process in stopped:
        os.kill(process, signal.SIGCONT)
    passed = answer.status_code == 503 and abs(seconds - LIMITS["deadline_s"]) < 5
    report("ray hang", passed, f"status {answer.status_code} after {seconds:.0f} s, {answer.text}")


def kill(dashboard, logs):
    """Kills one replica after the other under load: each request must still be answered, and rightly."""
    _, expected = greedy()
    failed, answered, stop = [], [], threading.Event()

    def client(number):
        with requests.Session() as session:
            n = 7 + number
            while not stop.is_set():
                answer = post("/completions", {"prompt": expected[:n], "max_tokens": 100}, session)
                right = answer.status_code == 200 and answer.json()["token_ids"] == expected[n : n + 100]
                (answered if right else failed).append(answer)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for one in clients:
        one.start()
    waited = []
    for victim in replicas(dashboard, "Text"):
        time.sleep(3)
        before = set(replicas(dashboard, "Text"))
        os.kill(victim, signal.SIGKILL)
        begin = time.monotonic()
        new = wait(lambda: set(replicas(dashboard, "Text")) - before)
        waited.append(f"{time.monotonic() - begin:.0f}" if new else "never")
    time.sleep(1)
    stop.set()
    for one in clients:
        one.join()
    retried = sum(log.read_text(errors="replace").count("try 1 of") for log in logs.glob("replica_moh_Ingress_*.log"))
    what = f"{len(answered)} requests of {CLIENTS} clients answered, {len(failed)} lost, {retried} asked again"
    passed = not failed and retried > 0 and "never" not in waited
    detail = "".join(f"; {one.text[:200]}" for one in failed[:1])
    report("ray SIGKILL", passed, f"{what}; {len(waited)} replicas killed, new ones after {' and '.join(waited)} s{detail}")


def batch(folder, vit, library, address):
    """The held-out digits; then a folder with files that are no pictures."""
    pictures = folder / "pictures/three"
    pictures.mkdir(parents=True)
    (pictures / "3.png").write_bytes((ROOT / "examples/pictures/3.png").read_bytes())
    (pictures / "empty.png").write_bytes(b"")
    # As many as there are CPUs: reading must not wait for one.
    options = ["--workers", "8", *(["--library", library] if library else [])]
    environment = {**os.environ, "RAY_ADDRESS": address}
    for source, status, expected in [
        (CHECKPOINTS / "digits-moh-vit/heldout.safetensors", 0, "297 files, 0 of them no pictures"),
        (folder / "pictures", 1, "2 files, 1 of them no pictures"),
    ]:
        output = folder / f"results-{status}"
        command = [sys.executable, EXAMPLE / "batch_infer.py", vit, source, "-o", output, *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        rows = [json.loads(line) for file in output.glob("*.json") for line in file.read_text().splitlines()]
        said = done.stdout.strip().splitlines()[-2:] or [done.stderr[-500:]]
        right = [row["right"] for row in rows if row["right"] is not None]
        passed = done.returncode == status and expected in done.stdout and sum(right) / max(len(right), 1) > 0.99
        report(f"ray data {source.name}", passed, ", ".join(said))


def main():
    llama, vit = sys.argv[1:3]
    library = sys.argv[3] if len(sys.argv) > 3 else None
    os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0", PYTHONPATH=str(EXAMPLE))
    kuberay()
    # More CPUs than there may be: what is checked is no speed.
    cluster = ray.init("local", num_cpus=8, include_dashboard=True, log_to_driver=False)
    dashboard, address = cluster.dashboard_url, cluster.address_info["address"]
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(CLIENTS) as pool:
        folder = Path(name)
        server = start(folder, llama, vit, library, address)
        log = folder / "serve.log"
        try:
            if not wait(lambda: all(len(replicas(dashboard, one)) == 2 for one in ("Text", "Images"))):
                report("ray serve", False, log.read_text(errors="replace")[-2000:])
            wait(lambda: post("/completions", {"prompt": "a"}).status_code == 200)
            texts(pool)
            accuracy(pool)
            bad_requests()
            overload()
            kill(dashboard, Path(cluster.address_info["session_dir"]) / "logs/serve")
            hang(dashboard)
            texts(pool)
        finally:
            server.terminate()
            server.wait()
        batch(folder, vit, library, address)
    ray.shutdown()


if __name__ == "__main__":
    main()
