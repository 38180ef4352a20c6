#!/usr/bin/env python3
"""Runs exported folders with Optimum: language models, image classifiers and translation models.

usage: check_optimum.py [--library LIBRARY] [--llama FOLDER]... [--vit FOLDER]... [--moa FOLDER MOA_REFERENCE]...

A folder is one export: the model is beside config.json or in the folder `onnx`. MOA_REFERENCE is a folder with encoder.onnx and
decoder.onnx, exported with --part, whose greedy tokens are the expected ones.
"""

import argparse
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
from common import digits, equal, greedy, report
from optimum.onnxruntime import ORTModelForCausalLM, ORTModelForImageClassification, ORTModelForSeq2SeqLM
from transformers import AutoImageProcessor, AutoTokenizer, pipeline


# The token that ends a text, and that translations begin with.
END = 2


def llama(folder, options):
    prompt, expected = greedy()
    model = ORTModelForCausalLM.from_pretrained(folder, session_options=options, use_io_binding=False)
    tokens = AutoTokenizer.from_pretrained(folder)([prompt], return_tensors="pt")
    # Without a length of its own: the folder's generation_config.json says how far.
    found = model.generate(**tokens)[0].tolist()
    equal(f"optimum {folder}", found[: len(expected)], expected)
    length = model.generation_config.max_length
    report(f"optimum {folder}", length == 512 == len(found), f"{len(found)} tokens, as generation_config.json says")


def vit(folder, options):
    model = ORTModelForImageClassification.from_pretrained(folder, session_options=options)
    processor = AutoImageProcessor.from_pretrained(folder, use_fast=False)
    classify = pipeline("image-classification", model=model, image_processor=processor, top_k=1)
    pictures, labels = digits()
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    found = classify(pictures, batch_size=16)
    right = sum(one[0]["label"] == names[label] for one, label in zip(found, labels))
    report(f"optimum {folder}", right / len(labels) > 0.99, f"{right} of {len(labels)} held-out digits")


def moa_reference(folder, ids, mask, length):
    """Greedy tokens of encoder.onnx and of decoder.onnx, which serves every call, without the one that ends texts."""
    session = lambda name: ort.InferenceSession(str(Path(folder) / name), providers=["CPUExecutionProvider"])
    encoder, decoder = session("encoder.onnx"), session("decoder.onnx")
    (states,) = encoder.run(None, {"input_ids": ids, "attention_mask": mask})
    shapes = {port.name: port.shape for port in decoder.get_inputs() if port.name.startswith("past")}
    caches = {name: np.zeros((len(ids), shape[1], 0, shape[3]), np.float32) for name, shape in shapes.items()}
    names = [port.name for port in decoder.get_outputs()]
    tokens = np.full((len(ids), 1), END)
    while tokens.shape[1] < length:
        feeds = {"input_ids": tokens[:, -1:], "encoder_hidden_states": states, "encoder_attention_mask": mask}
        outputs = dict(zip(names, decoder.run(None, {**feeds, **caches})))
        caches = {name: outputs[name.replace("past_key_values", "present")] for name in caches}
        states = states[:, :0]
        logits = outputs["logits"][:, -1].copy()
        logits[:, END] = -np.inf
        tokens = np.concatenate([tokens, logits.argmax(-1)[:, None]], 1)
    return tokens


def moa(folder, reference, options):
    model = ORTModelForSeq2SeqLM.from_pretrained(
        folder, session_options=options, use_io_binding=False, use_merged=False
    )
    ids = np.array([[7, 30, 12, 49, END], [15, 25, END, 1, 1]])
    mask = (ids != 1).astype(np.int64)
    length = 20
    expected = moa_reference(reference, ids, mask, length)
    arguments = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask), "do_sample": False}
    found = model.generate(**arguments, max_length=length, min_length=length, num_beams=1).numpy()
    for row in range(len(ids)):
        whose = f"those of encoder.onnx and decoder.onnx, {len(set(expected[row]))} different ones"
        equal(f"optimum {folder} row {row}", found[row].tolist(), expected[row].tolist(), whose)
    beams = model.generate(**arguments, max_length=length, num_beams=3)
    report(f"optimum {folder}", beams.shape[0] == 2, f"3 beams: {tuple(beams.shape)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library")
    parser.add_argument("--llama", action="append", default=[])
    parser.add_argument("--vit", action="append", default=[])
    parser.add_argument("--moa", action="append", default=[], nargs=2)
    arguments = parser.parse_args()
    options = ort.SessionOptions()
    if arguments.library:
        options.register_custom_ops_library(arguments.library)
    for folder in arguments.llama:
        llama(folder, options)
    for folder in arguments.vit:
        vit(folder, options)
    for folder, reference in arguments.moa:
        moa(folder, reference, options)


if __name__ == "__main__":
    main()
