#!/usr/bin/env python3
"""What `moh-run serve` does with a language model of 1.2 billion parameters under 1, 4 and 16 streams, beside what else runs such a model.

usage: serve_load.py make FOLDER --export MOH_EXPORT [--gguf]
       serve_load.py server FOLDER --run MOH_RUN [--runtime ort|tract]
       serve_load.py batch FOLDER --run MOH_RUN [--runtime ort|tract]
       serve_load.py genai FOLDER --ops LIBMOH_OPS
       serve_load.py llama.cpp FOLDER

make writes the shape of LLaMA 3.2 1B with random weights in int8 and a cache in place, and with --gguf (needs the package gguf) the dense
model of this shape in Q8_0. server asks the server over HTTP; batch is one fixed batch of `moh-run generate`, without a server; genai is
onnxruntime-genai's loop in Python on the same export; llama.cpp is its server on the dense model, through xllamacpp. All prompts are token
numbers; all texts have the same length, and take the most probable token unless --temperature says otherwise. Prints a row a measurement:

    tokens/s      generated tokens in all, divided by the time from the first request to the last answer, so with the prompts
    all running   tokens/s while every stream is between its first and last token, so without the prompts
    first, next   milliseconds to the first token, and between two tokens of a stream: median and 99th percentile

Run one at a time, on a machine that does nothing else.
"""

import argparse
import http.client
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "family": "moh-llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 4096, "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0, "tie_word_embeddings": True, "hidden_act": "silu",
}
COLUMNS = "| who | streams | tokens/s | all running | first ms, p50 / p99 | next ms, p50 / p99 | most memory MiB |\n|---|--:|--:|--:|--:|--:|--:|"


def make(arguments):
    folder = arguments.folder
    (folder / "export").mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if not (folder / "export/model.onnx").exists():
        command = [arguments.export, "random", folder / "config.json", "-o", folder / "checkpoint", "--dtype", "bf16"]
        subprocess.run(command, check=True)
        command = [arguments.export, folder / "checkpoint", "-o", folder / "export/model.onnx", "--for", "ort-cpu"]
        subprocess.run([*command, "--quantize", "int8", "--cache", "in-place", "--no-verify"], check=True)
        shutil.rmtree(folder / "checkpoint")
    words = {f"w{i}": i for i in range(CONFIG["vocab_size"])}
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
                 "pre_tokenizer": None, "post_processor": None, "decoder": None,
                 "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"}}
    (folder / "export/tokenizer.json").write_text(json.dumps(tokenizer))
    if arguments.gguf and not (folder / "q8_0.gguf").exists():
        sys.path.insert(0, str(ROOT / "ci"))
        import llama_cpp

        llama_cpp.write(CONFIG, folder / "q8_0.gguf", "q8_0")


def prompt(number, tokens):
    """Another one for each stream, so that nothing is reused."""
    return [3 + (7919 * number + 31 * i) % 100_000 for i in range(tokens)]


def percentiles(seconds):
    ordered = sorted(seconds)
    if not ordered:
        return "-"
    at = lambda share: ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3
    return f"{at(0.5):.0f} / {at(0.99):.0f}"


def row(who, streams, began, times, memory):
    """`times`: of each stream, when its tokens came."""
    ends, count = max(t[-1] for t in times), sum(len(t) for t in times)
    start, end = max(t[0] for t in times), min(t[-1] for t in times)
    together = sum(start < t <= end for stream in times for t in stream)
    rate = f"{together / (end - start):.1f}" if end > start else "-"
    gaps = [b - a for t in times for a, b in zip(t, t[1:])]
    first = percentiles([t[0] - began for t in times])
    print(f"| {who} | {streams} | {count / (ends - began):.1f} | {rate} | {first} | {percentiles(gaps)} | {memory} |", flush=True)


def most_memory(process):
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    return int(re.search(r"VmHWM:\s+(\d+)", status).group(1)) // 1024


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def read_stream(address, path, body):
    """When each event with a piece of text came."""
    connection = http.client.HTTPConnection(address, timeout=600)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"{address}{path} answered {answer.status}: {answer.read()[:300]}")
    times = []
    for line in answer:
        if line.startswith(b"data: {"):
            choice = json.loads(line[6:])
            choice = choice["choices"][0] if "choices" in choice else choice
            if choice.get("text") or choice.get("content"):
                times.append(time.monotonic())
            if "error" in choice:
                raise RuntimeError(choice)
    connection.close()
    return times


def measure(arguments, who, address, body, pid):
    """Rows for each number of streams, which begin at once."""
    turn = 0
    read_stream(address, "/v1/completions", {**body(0), "max_tokens": 4})
    for streams in arguments.streams:
        times, failed = [None] * streams, []

        def client(i, number):
            try:
                times[i] = read_stream(address, "/v1/completions", body(number))
            except (RuntimeError, OSError) as error:
                failed.append(error)

        threads = [threading.Thread(target=client, args=(i, turn + i)) for i in range(streams)]
        turn += streams
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            sys.exit(f"serve_load: {who}: {failed[0]}")
        # A piece of text may hold several tokens that came together; none may be missing.
        short = [len(t) for t in times if len(t) < arguments.tokens * 0.9]
        if short:
            sys.exit(f"serve_load: {who}: {short} pieces of text, expected {arguments.tokens}")
        row(who, streams, began, times, most_memory(pid))


def server(arguments):
    port = free_port()
    command = [arguments.run, "serve", f"llama={arguments.folder / 'export'}", "--listen", f"127.0.0.1:{port}", "--quiet"]
    command += ["--runtime", arguments.runtime, "--threads", str(arguments.threads), "--slots", str(max(arguments.streams))]
    process = subprocess.Popen([*command, *arguments.options])
    try:
        end = time.monotonic() + 120
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            try:
                connection.request("GET", "/v2/health/ready")
                if connection.getresponse().status == 200:
                    break
            except OSError:
                pass
            if process.poll() is not None or time.monotonic() > end:
                sys.exit("serve_load: the server did not start")
            time.sleep(0.1)
        body = lambda number: {"model": "llama", "prompt": prompt(number, arguments.prompt), "max_tokens": arguments.tokens,
                               "temperature": arguments.temperature, "ignore_eos": True, "stream": True, "seed": number}
        measure(arguments, f"moh-run serve, {arguments.runtime}", f"127.0.0.1:{port}", body, process.pid)
    finally:
        process.terminate()
        process.wait(60)


def batch(arguments):
    for streams in arguments.streams:
        command = [arguments.run, "generate", arguments.folder / "export", "--ids", "--ignore-eos", "--json", "--quiet"]
        command += ["--runtime", arguments.runtime, "--threads", str(arguments.threads), "--max-tokens", str(arguments.tokens)]
        if arguments.temperature:
            command += ["--temperature", str(arguments.temperature)]
        for number in range(streams):
            command += ["--prompt", " ".join(map(str, prompt(number, arguments.prompt)))]
        said = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        first, rest = said["prefill_ms"] / 1e3, said["decode_ms"] / 1e3
        whole, decoding = streams * arguments.tokens / (first + rest), streams * (arguments.tokens - 1) / rest
        print(f"| fixed batch, {arguments.runtime} | {streams} | {whole:.1f} | {decoding:.1f} | {first * 1e3:.0f} | "
              f"{rest / (arguments.tokens - 1) * 1e3:.0f} | |", flush=True)


def genai(arguments):
    import onnxruntime_genai as og

    # It looks for the library in the model's folder only.
    shutil.copy(arguments.ops, arguments.folder / "export")
    options = {"intra_op_num_threads": arguments.threads, "custom_ops_library": Path(arguments.ops).name}
    config = og.Config(str(arguments.folder / "export"))
    config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
    model = og.Model(config)
    for streams in arguments.streams:
        # As its examples do: a generator, a loop. Its Engine pads prompts of unequal length wrongly for such models; these have one length.
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=arguments.prompt + arguments.tokens, batch_size=streams, do_sample=False)
        began = time.monotonic()
        generator = og.Generator(model, params)
        generator.append_tokens([prompt(number, arguments.prompt) for number in range(streams)])
        times = []
        while not generator.is_done() and len(times) < arguments.tokens:
            generator.generate_next_token()
            times.append(time.monotonic())
        row("onnxruntime-genai", streams, began, [times] * streams, most_memory(os.getpid()))
        del generator


def llama_cpp(arguments):
    import xllamacpp

    streams = max(arguments.streams)
    params = xllamacpp.CommonParams()
    params.model.path = str(arguments.folder / "q8_0.gguf")
    params.n_parallel = streams
    params.n_ctx = streams * (arguments.prompt + arguments.tokens + 64)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = arguments.threads
    params.hostnames, params.port = ["127.0.0.1"], free_port()
    params.verbosity = 0
    running = xllamacpp.Server(params)
    body = lambda number: {"prompt": prompt(number, arguments.prompt), "max_tokens": arguments.tokens, "temperature": arguments.temperature,
                           "ignore_eos": True, "stream": True, "cache_prompt": False}
    address = running.listening_address.removeprefix("http://")
    measure(arguments, "llama.cpp, Q8_0, dense", address, body, os.getpid())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "server", "batch", "genai", "llama.cpp"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--export", metavar="MOH_EXPORT")
    parser.add_argument("--run", metavar="MOH_RUN")
    parser.add_argument("--ops", metavar="LIBMOH_OPS")
    parser.add_argument("--gguf", action="store_true")
    parser.add_argument("--runtime", default="ort")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a text")
    parser.add_argument("--temperature", type=float, default=0)
    parser.add_argument("options", nargs="*", help="of moh-run serve, after --")
    arguments = parser.parse_args()
    if arguments.what != "make":
        print(COLUMNS, flush=True)
    {"make": make, "server": server, "batch": batch, "genai": genai, "llama.cpp": llama_cpp}[arguments.what](arguments)


if __name__ == "__main__":
    main()
