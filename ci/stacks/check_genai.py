#!/usr/bin/env python3
"""Generates with onnxruntime-genai from exported folders and compares the tokens with PyTorch's.

usage: check_genai.py FOLDER...
"""

import sys

import onnxruntime_genai as og
from common import equal, greedy, report


def main():
    prompt, expected = greedy()
    for folder in sys.argv[1:]:
        model = og.Model(folder)
        tokenizer = og.Tokenizer(model)
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=len(expected), batch_size=2)
        generator = og.Generator(model, params)
        tokens = tokenizer.encode(prompt)
        generator.append_tokens([list(tokens), list(tokens)])
        while not generator.is_done():
            generator.generate_next_token()
        for row in range(2):
            equal(f"genai {folder} row {row}", list(generator.get_sequence(row)), expected)
        text = tokenizer.decode(generator.get_sequence(0))
        report(f"genai {folder}", text.startswith(prompt), repr(text[:60]))


if __name__ == "__main__":
    main()
