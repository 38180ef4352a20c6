#!/usr/bin/env python3
"""Serves models with `moh-run serve` and calls it with the openai and tritonclient packages, then under load.

usage: serve.py MOH_RUN LLAMA CHAT DIGITS [--seconds 60] [--runtime tract] [--clients 64]

LLAMA and CHAT are exports of shakespeare-moh-llama, CHAT with a chat template; DIGITS is one of digits-moh-vit. Prints a line a check, and
tokens/s at 1, 4 and 16 streams with the median and the 99th percentile of the time of a request. Exits with 1 if a check failed.
"""

import argparse
import http.client
import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import common
import numpy as np
import openai
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

PROMPTS = ["ROMEO:\n", "JULIET:\nO", "First Citizen:\n", "KING RICHARD II:\nMy", "The", "QUEEN MARGARET:\nNow", "a", "What is the"]
# Resident memory may grow by this much under load, in MiB: buffers of the allocator.
GROWTH = 48


def report(name, passed, what=""):
    common.report(name, bool(passed), what)


def equal(name, found, expected):
    report(name, found == expected, f"{str(found)[:70]!r}" + ("" if found == expected else f", expected {str(expected)[:70]!r}"))


class Server:
    """A running `moh-run serve`."""

    def __init__(self, arguments):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.log = []
        self.process = subprocess.Popen(
            [*arguments, "--listen", self.address], stderr=subprocess.PIPE, text=True, errors="replace"
        )
        threading.Thread(target=self._read, daemon=True).start()
        end = time.monotonic() + 120
        while True:
            try:
                if self.get("/v2/health/ready")[0] == 200:
                    return
            except OSError:
                pass
            if self.process.poll() is not None or time.monotonic() > end:
                sys.exit("serve: the server did not start:\n" + "".join(self.log))
            time.sleep(0.05)

    def _read(self):
        for line in self.process.stderr:
            self.log.append(line)
            del self.log[:-200]

    def get(self, path):
        try:
            with urllib.request.urlopen(f"http://{self.address}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def measured(self, *words):
        """The first measurement with these words in its line."""
        for line in self.get("/metrics")[1].splitlines():
            if not line.startswith("#") and all(word in line for word in words):
                return float(line.rsplit(" ", 1)[1])
        return 0.0

    def resident(self):
        """Resident memory in MiB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return int(re.search(r"VmRSS:\s+(\d+)", status).group(1)) / 1024


def prompts(count):
    """Prompts of unequal lengths."""
    return [PROMPTS[i % len(PROMPTS)] * (1 + i // 3 % 4) for i in range(count)]


def generated(arguments, model, texts, tokens):
    """What `moh-run generate` continues them with, one at a time."""
    found = []
    for text in texts:
        command = [arguments.moh_run, "generate", model, "--prompt", text, "--max-tokens", str(tokens), "--json", "--quiet"]
        command += ["--runtime", arguments.runtime, "--threads", "2"]
        said = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
        found.append(json.loads(said)["texts"][0]["text"])
    return found


def check_openai(client, expected):
    prompt, _ = common.greedy()
    names = sorted(model.id for model in client.models.list())
    equal("openai models", names, ["chat", "llama"])
    greedily = {"model": "llama", "temperature": 0}
    whole = client.completions.create(prompt=prompt, max_tokens=60, **greedily)
    equal("openai completion", whole.choices[0].text, expected["prompt"])
    equal("openai usage", whole.usage.completion_tokens, 60)
    chunks = list(client.completions.create(
        prompt=prompt, max_tokens=60, stream=True, stream_options={"include_usage": True}, **greedily
    ))
    streamed = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    equal("openai stream", streamed, expected["prompt"])
    equal("openai stream's usage", chunks[-1].usage.total_tokens, whole.usage.total_tokens)
    stopped = client.completions.create(prompt=prompt, max_tokens=60, stop=["king"], **greedily)
    equal("openai stop", (stopped.choices[0].text, stopped.choices[0].finish_reason),
          (expected["prompt"].split("king")[0], "stop"))
    seeds = [client.completions.create(model="llama", prompt=prompt, max_tokens=30, seed=seed).choices[0].text for seed in (7, 7, 8)]
    report("openai seed", seeds[0] == seeds[1] != seeds[2], seeds[0][:30])
    messages = [{"role": "user", "content": "Who are you?"}]
    said = client.chat.completions.create(model="chat", messages=messages, max_tokens=24, temperature=0)
    equal("openai chat", said.choices[0].message.content, expected["chat"])
    pieces = client.chat.completions.create(model="chat", messages=messages, max_tokens=24, temperature=0, stream=True)
    equal("openai chat stream", "".join(piece.choices[0].delta.content or "" for piece in pieces), expected["chat"])
    for name, error, call in [
        ("unknown model", openai.NotFoundError, lambda: client.completions.create(model="nobody", prompt="x")),
        ("two choices", openai.BadRequestError, lambda: client.completions.create(prompt="x", n=2, **greedily)),
        ("long prompt", openai.BadRequestError, lambda: client.completions.create(prompt="ROMEO " * 600, **greedily)),
        ("no template", openai.BadRequestError, lambda: client.chat.completions.create(model="llama", messages=messages)),
    ]:
        try:
            call()
            report(f"openai {name}", False, "it was accepted")
        except error as refusal:
            report(f"openai {name}", True, str(refusal)[:70])


def check_triton(server):
    pictures, labels = common.digits()
    # As preprocessor_config.json says.
    pixels = np.stack([np.asarray(picture, dtype=np.float32) for picture in pictures]).transpose(0, 3, 1, 2) / 127.5 - 1
    grpc, rest = triton_grpc.InferenceServerClient(server.address), triton_http.InferenceServerClient(server.address)
    found = {}
    for name, client, module in [("grpc", grpc, triton_grpc), ("http", rest, triton_http)]:
        report(f"tritonclient {name} health", client.is_server_live() and client.is_server_ready() and client.is_model_ready("digits"))
        metadata = client.get_model_metadata("digits")
        metadata = metadata if isinstance(metadata, dict) else {"inputs": [{"datatype": metadata.inputs[0].datatype}]}
        datatype = metadata["inputs"][0]["datatype"]
        numbers = pixels.astype(np.float16 if datatype == "FP16" else np.float32)
        rows = []
        for start in range(0, len(numbers), 16):
            part = numbers[start : start + 16]
            tensor = module.InferInput("pixel_values", part.shape, datatype)
            tensor.set_data_from_numpy(part)
            answer = client.infer("digits", [tensor], outputs=[module.InferRequestedOutput("logits")])
            rows.append(answer.as_numpy("logits").astype(np.float32))
        found[name] = np.concatenate(rows)
        right = int((found[name].argmax(1) == np.array(labels)).sum())
        report(f"tritonclient {name} infer", right >= 0.99 * len(labels), f"{right} of {len(labels)} digits right")
        try:
            client.infer("nobody", [tensor])
            report(f"tritonclient {name} unknown model", False)
        except Exception as refusal:  # each module has its own
            report(f"tritonclient {name} unknown model", "nobody" in str(refusal), str(refusal)[:70])
    report("tritonclient grpc = http", np.allclose(found["grpc"], found["http"], atol=2e-2))


def stream(server, prompt, tokens, pause=0.0, leave_after=None):
    """A text read as it comes: (text, whether it came to its end). `pause`: seconds before each read; `leave_after`: events."""
    connection = http.client.HTTPConnection(server.address, timeout=120)
    body = {"model": "llama", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        status = answer.status
        answer.read()
        connection.close()
        return status, False
    text, events = "", 0
    for line in answer:
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            connection.close()
            return text, True
        text += json.loads(line[6:])["choices"][0]["text"]
        events += 1
        if leave_after is not None and events >= leave_after:
            connection.sock.close()
            connection.close()
            return text, False
        if pause:
            time.sleep(pause)
    connection.close()
    return text, False


class Load:
    """Clients of all kinds for a while. Everybody who stays gets the right text."""

    def __init__(self, server, texts, expected, seconds):
        self.server, self.texts, self.expected = server, texts, expected
        self.end = time.monotonic() + seconds
        self.lock = threading.Lock()
        self.done = {"plain": 0, "slow": 0, "left": 0, "garbage": 0, "tensors": 0, "refused": 0}
        self.wrong = []

    def count(self, what):
        with self.lock:
            self.done[what] += 1

    def fail(self, what):
        with self.lock:
            self.wrong.append(what)

    def client(self, number):
        kind = ["plain", "plain", "slow", "left", "plain", "garbage", "tensors", "plain"][number % 8]
        rng = random.Random(number)
        while time.monotonic() < self.end:
            try:
                getattr(self, kind)(rng)
            except Exception as error:
                self.fail(f"{kind}: {error!r}")
                time.sleep(0.1)

    def text(self, rng, kind, pause):
        i = rng.randrange(len(self.texts))
        text, ended = stream(self.server, self.texts[i], 40, pause=pause)
        if isinstance(text, int):
            if text != 429:
                self.fail(f"{kind}: status {text}")
            self.count("refused")
            time.sleep(0.2)
        elif not ended or text != self.expected[i]:
            self.fail(f"{kind}: {self.texts[i]!r}: {text!r}, expected {self.expected[i]!r}, to its end: {ended}")
        else:
            self.count(kind)

    def plain(self, rng):
        self.text(rng, "plain", 0.0)

    def slow(self, rng):
        self.text(rng, "slow", 0.02)

    def left(self, rng):
        stream(self.server, rng.choice(self.texts), 400, leave_after=rng.randrange(1, 6))
        self.count("left")

    def tensors(self, rng):
        pictures = [[rng.uniform(-1, 1)] * (3 * 64 * 64)]
        body = {"inputs": [{"name": "pixel_values", "shape": [1, 3, 64, 64], "datatype": self.datatype, "data": pictures}]}
        connection = http.client.HTTPConnection(self.server.address, timeout=120)
        connection.request("POST", "/v2/models/digits/infer", json.dumps(body))
        answer = connection.getresponse()
        said = answer.read()
        connection.close()
        if answer.status == 200 and len(json.loads(said)["outputs"][0]["data"]) == 10:
            self.count("tensors")
        elif answer.status == 429:
            self.count("refused")
        else:
            self.fail(f"tensors: {answer.status} {said[:100]}")

    def garbage(self, rng):
        bodies = [b"", b"{", b"\x00" * 1000, b"[" * 50_000, b'{"model": "llama", "prompt": ' + b"9" * 5000 + b"}",
                  b'{"model": "llama", "prompt": [1e999]}', rng.randbytes(rng.randrange(1, 5000))]
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=30) as raw:
            body = rng.choice(bodies)
            if rng.random() < 0.5:
                length = rng.choice([len(body), len(body) + 100, 10**12, 0])
                body = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n".encode() + body
            try:
                raw.sendall(body)
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(65536):
                    pass
            except TimeoutError:
                raise
            except OSError:
                pass  # The server has closed it already.
        self.count("garbage")

    def run(self, clients):
        threads = [threading.Thread(target=self.client, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        resident = []
        while any(thread.is_alive() for thread in threads):
            time.sleep(1)
            resident.append(self.server.resident())
        return resident


def throughput(server, streams, texts, expected, tokens):
    """Tokens/s and the times of requests, with so many clients that ask again and again."""
    times, wrong = [], []
    rounds = max(3, 24 // streams)

    def client(number):
        for turn in range(rounds):
            i = (number + turn) % len(texts)
            began = time.monotonic()
            text, _ = stream(server, texts[i], tokens)
            times.append(time.monotonic() - began)
            if text != expected[i]:
                wrong.append(text)

    before, began = server.measured("moh_tokens_total", "llama", "generated"), time.monotonic()
    threads = [threading.Thread(target=client, args=(number,)) for number in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - began
    rate = (server.measured("moh_tokens_total", "llama", "generated") - before) / seconds
    p50, p99 = np.percentile(times, [50, 99]) * 1e3
    report(f"serve {streams} streams", not wrong, f"{rate:.0f} tokens/s, a request p50 {p50:.0f} ms, p99 {p99:.0f} ms")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("moh_run")
    parser.add_argument("llama")
    parser.add_argument("chat")
    parser.add_argument("digits")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--runtime", default="tract")
    arguments = parser.parse_args()
    models = [f"llama={arguments.llama}", f"chat={arguments.chat}", f"digits={arguments.digits}"]
    server = Server([arguments.moh_run, "serve", *models, "--runtime", arguments.runtime, "--threads", "2"])
    try:
        check(arguments, server)
    finally:
        server.process.kill()


def check(arguments, server):
    client = openai.OpenAI(base_url=f"http://{server.address}/v1", api_key="none", max_retries=0)
    prompt, _ = common.greedy()
    texts = prompts(16)
    expected = generated(arguments, arguments.llama, texts, 40)
    chat = generated(arguments, arguments.chat, ["USER:\nWho are you?\n\nROMEO:\n"], 24)[0]
    check_openai(client, {"prompt": generated(arguments, arguments.llama, [prompt], 60)[0], "chat": chat})
    check_triton(server)
    for streams in (1, 4, 16):
        throughput(server, streams, texts, expected, 40)

    load = Load(server, texts, expected, arguments.seconds)
    load.datatype = json.loads(server.get("/v2/models/digits")[1])["inputs"][0]["datatype"]
    resident = load.run(arguments.clients)
    for wrong in load.wrong[:5]:
        print("   ", wrong)
    report(f"serve {arguments.clients} connections for {arguments.seconds:.0f} s", not load.wrong, str(load.done))
    # What the first third needs is needed: afterwards memory is flat.
    third = max(1, len(resident) // 3)
    early, late = max(resident[:third]), max(resident[-third:])
    report("serve resident memory", late - early < GROWTH, f"{early:.0f} MiB, then {late:.0f} MiB")
    end = time.monotonic() + 20
    while server.measured("moh_slots_used", "llama") and time.monotonic() < end:
        time.sleep(0.1)
    equal("serve slots after the load", server.measured("moh_slots_used", "llama"), 0.0)
    equal("serve restarts", server.measured("moh_restarts_total"), 0.0)
    again = client.completions.create(model="llama", prompt=texts[0], max_tokens=40, temperature=0)
    equal("serve text after the load", again.choices[0].text, expected[0])

    last = []
    thread = threading.Thread(target=lambda: last.append(stream(server, texts[0], 40)))
    thread.start()
    time.sleep(0.02)
    server.process.send_signal(signal.SIGTERM)
    thread.join()
    report("serve SIGTERM", server.process.wait(30) == 0, str(last[0])[:60])


if __name__ == "__main__":
    main()
