#!/usr/bin/env python3
"""Generates with onnxruntime-genai's Engine from prompts of unequal length at once, and compares with each prompt alone.

usage: check_genai_engine.py FOLDER...
"""

import sys

import numpy as np
import onnxruntime_genai as og
from common import equal, greedy

NEW = 24


def alone(model, tokens):
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=len(tokens) + NEW)
    generator = og.Generator(model, params)
    generator.append_tokens(tokens)
    while not generator.is_done():
        generator.generate_next_token()
    return [int(token) for token in generator.get_sequence(0)][len(tokens) :]


def together(model, prompts):
    engine = og.Engine(model)
    requests = []
    for i, tokens in enumerate(prompts):
        options = og.RequestOptions()
        options.set_max_session_tokens(len(tokens) + NEW)
        request = engine.create_request(options=options)
        turn = og.TurnOptions(request)
        turn.set_max_generated_tokens(NEW)
        turn.set_do_sample(False)
        request.begin_turn(np.array(tokens, np.int32), turn)
        requests.append(request)
    found = [[] for _ in prompts]
    buffer = engine.create_event_buffer(64)
    while engine.has_pending_requests():
        for event in engine.run(buffer) or []:
            if event.flags & og.EngineEventFlags.TOKEN:
                found[requests.index(event.request)].append(int(event.token))
    return found


def main():
    _, ids = greedy()
    prompts = [ids[:7], ids[:40], ids[:19]]
    for folder in sys.argv[1:]:
        model = og.Model(folder)
        expected = [alone(model, tokens) for tokens in prompts]
        for i, (tokens, right) in enumerate(zip(together(model, prompts), expected)):
            equal(f"genai Engine {folder} prompt {i}", tokens, right, "the prompt's alone")


if __name__ == "__main__":
    main()
