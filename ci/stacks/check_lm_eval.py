#!/usr/bin/env python3
"""Measures a model with lm-evaluation-harness through `moh-run serve`, and with onnxruntime alone.

usage: check_lm_eval.py MOH_RUN SERVED MODEL

SERVED and MODEL are exports of shakespeare-moh-llama, with the cache in place and concatenated. Prints a line; exits with 1 where the
harness finds another perplexity or other words that are the most probable ones.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import common
import numpy as np
import onnxruntime

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
import lm_eval  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

TASK = """task: last_words
dataset_path: json
dataset_kwargs: {data_files: "%s"}
test_split: train
output_type: loglikelihood
doc_to_text: "{{begin}}"
doc_to_target: "{{end}}"
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
LINES = [
    ("ROMEO:\nO, that I were a glove upon that", " hand"),
    ("JULIET:\nO Romeo, Romeo! wherefore art thou", " Romeo"),
    ("First Citizen:\nBefore we proceed any further, hear me", " speak"),
    ("KING RICHARD II:\nWhat says my", " lord"),
    ("The duke of", " York"),
]
PORT = 8127


def likelihood(session, tokenizer, begin, end):
    """The logarithm of the probability of `end`, and whether each of its tokens is the most probable one."""
    context = tokenizer.encode(begin)
    tokens = tokenizer.encode(begin + end)
    feeds = {"input_ids": np.array([tokens], np.int64), "attention_mask": np.ones((1, len(tokens)), np.int64)}
    for given in session.get_inputs():
        if given.name == "position_ids":
            feeds[given.name] = np.arange(len(tokens), dtype=np.int64)[None]
        elif given.name.startswith("past"):
            feeds[given.name] = np.zeros((1, given.shape[1], 0, given.shape[3]), np.float32)
    logits = session.run(["logits"], feeds)[0][0].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    rows = range(len(context), len(tokens))
    return sum(logprobs[at - 1][tokens[at]] for at in rows), all(logprobs[at - 1].argmax() == tokens[at] for at in rows)


def main():
    program, served, model = sys.argv[1:]
    server = subprocess.Popen([program, "serve", f"llama={served}", "--listen", f"127.0.0.1:{PORT}"], stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health").close()
                break
            except OSError:
                time.sleep(0.1)
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder, "lines.jsonl")
            data.write_text("".join(json.dumps({"begin": begin, "end": end}) + "\n" for begin, end in LINES))
            Path(folder, "last_words.yaml").write_text(TASK % data)
            found = lm_eval.simple_evaluate(
                model="local-completions",
                model_args={
                    "model": "llama",
                    "base_url": f"http://127.0.0.1:{PORT}/v1/completions",
                    "tokenizer": served,
                    "num_concurrent": 2,
                    "max_length": 512,
                },
                tasks=["last_words"],
                task_manager=TaskManager(include_path=folder, include_defaults=False),
                batch_size=3,
                bootstrap_iters=0,
            )["results"]["last_words"]
    finally:
        server.terminate()
        server.wait()
    session = onnxruntime.InferenceSession(str(Path(model, "model.onnx")), providers=["CPUExecutionProvider"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(Path(model, "tokenizer.json")))
    likelihoods = [likelihood(session, tokenizer, begin, end) for begin, end in LINES]
    perplexity = math.exp(-sum(logprob for logprob, _ in likelihoods) / len(LINES))
    right = sum(greedy for _, greedy in likelihoods) / len(LINES)
    both = found["perplexity,none"], found["acc,none"]
    passed = abs(both[0] / perplexity - 1) < 1e-3 and both[1] == right
    common.report("lm-evaluation-harness", passed, f"perplexity {both[0]:.4f}, onnxruntime {perplexity:.4f}; right {both[1]}, {right}")


main()
