#!/usr/bin/env python3
"""llama.cpp on a dense LLaMA of an exported model's shape: weights of 4 bits (Q4_0) that are random, since speed does not depend on them.

usage: ci/llama_cpp.py CONFIG_JSON [--folder FOLDER] [--threads 2] [--tokens 16] [--only TEXT]

Writes FOLDER/SHAPE.gguf, as large as an int4 export, unless it is there; then prints what a token takes after 128, 1024 and 4096 others,
and what 512 tokens at once take: the shortest and the median of several. ci/bench.sh llm measures our side; run both in turns on a machine
that does nothing else. xllamacpp and gguf, llama.cpp's bindings with binaries and the writer of its format, are installed into
target/llama-cpp once.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ["xllamacpp==2026.10.11549", "gguf==0.19.0"]
BLOCK = 32
# Bytes of a block, and the standard deviation of its integers when they are random.
KINDS = {"q4_0": (18, 4.6), "q8_0": (34, 73.9)}


def environment():
    """Runs this script again in an environment that has the packages."""
    folder = ROOT / "target" / "llama-cpp"
    python = folder / "bin" / "python"
    if pathlib.Path(sys.prefix).resolve() == folder.resolve():
        return
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        (folder / "ready").touch()
    os.execv(python, [str(python), *sys.argv])


def write(config, path, weights="q4_0"):
    import gguf
    import numpy as np

    hidden, mlp, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    layers, head_dim = config["num_hidden_layers"], config.get("head_dim", hidden // heads)
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "llama")
    writer.add_vocab_size(vocabulary)
    writer.add_context_length(config.get("max_position_embeddings", 8192))
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(mlp)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-5))
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{weights.upper()}"])
    block_bytes, spread = KINDS[weights]
    # A vocabulary of made-up words: prompts are token ids.
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{i}>" for i in range(vocabulary)])
    writer.add_token_scores([0.0] * vocabulary)
    writer.add_token_types([1] * vocabulary)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    random = np.random.default_rng(0)

    def quantised(rows, columns):
        blocks = random.integers(0, 256, (rows, columns // BLOCK, block_bytes), dtype=np.uint8)
        # The first two bytes are the scale. Outputs of the inputs' size.
        blocks[:, :, :2] = np.frombuffer(np.float16(columns**-0.5 / spread).tobytes(), np.uint8)
        return blocks.reshape(rows, -1)

    tensors = [("token_embd", vocabulary, hidden), ("output_norm", None, hidden)]
    # Without it the embedding serves as the output.
    tensors += [] if config.get("tie_word_embeddings") else [("output", vocabulary, hidden)]
    for i in range(layers):
        tensors += [
            (f"blk.{i}.attn_norm", None, hidden),
            (f"blk.{i}.attn_q", heads * head_dim, hidden),
            (f"blk.{i}.attn_k", kv_heads * head_dim, hidden),
            (f"blk.{i}.attn_v", kv_heads * head_dim, hidden),
            (f"blk.{i}.attn_output", hidden, heads * head_dim),
            (f"blk.{i}.ffn_norm", None, hidden),
            (f"blk.{i}.ffn_gate", mlp, hidden),
            (f"blk.{i}.ffn_up", mlp, hidden),
            (f"blk.{i}.ffn_down", hidden, mlp),
        ]
    kind = gguf.GGMLQuantizationType[weights.upper()]
    for name, rows, columns in tensors:
        if rows is None:
            writer.add_tensor_info(f"{name}.weight", [columns], np.dtype(np.float32), columns * 4)
        else:
            bytes_a_row = columns // BLOCK * block_bytes
            dtype = np.dtype(np.uint8)
            writer.add_tensor_info(f"{name}.weight", [rows, bytes_a_row], dtype, rows * bytes_a_row, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, rows, columns in tensors:
        writer.write_tensor_data(np.ones(columns, np.float32) if rows is None else quantised(rows, columns))
    writer.close()
    part.rename(path)


class LlamaCpp:
    """A loaded model, one sequence."""

    def __init__(self, path, threads):
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = 4096 + 64
        params.n_parallel = 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.verbosity = 0
        self.server = xllamacpp.Server(params)

    def timings(self, prompt, tokens, cached=False):
        """Milliseconds: of the prompt, and of each further token. Cached: what an earlier prompt began with is not computed again."""
        ids = [3 + i % 1000 for i in range(prompt)]
        request = {"prompt": ids, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": cached}
        answer = self.server.handle_completions(request)
        answer = json.loads(answer) if isinstance(answer, (str, bytes)) else answer
        if "timings" not in answer:
            sys.exit(f"error: llama.cpp answered {answer}")
        found = answer["timings"]
        if not cached and found["prompt_n"] < prompt:
            sys.exit(f"error: llama.cpp read {found['prompt_n']} of {prompt} tokens")
        return found["prompt_ms"], found["predicted_per_token_ms"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--folder", default=ROOT / "target" / "bench" / "llm", type=pathlib.Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    environment()
    config = json.loads(pathlib.Path(arguments.config).read_text())
    arguments.folder.mkdir(parents=True, exist_ok=True)
    path = arguments.folder / f"q4_0-{config['num_hidden_layers']}x{config['hidden_size']}-{config['vocab_size']}.gguf"
    if not path.exists():
        write(config, path)
    start = time.monotonic()
    model = LlamaCpp(path, arguments.threads)
    model.timings(16, 1)
    print(f"{path.stat().st_size / 1e9:.2f} GB; start to the first token of a 16-token prompt: {time.monotonic() - start:.2f} s\n")
    print("| step | threads | ms, shortest (median) |\n|---|---|---|")
    for name, prompt, tokens in [
        ("decode after 128", 128, arguments.tokens),
        ("decode after 1024", 1024, arguments.tokens),
        ("decode after 4096", 4096 - arguments.tokens, arguments.tokens),
        ("prefill 512", 512, 1),
    ]:
        if arguments.only not in name:
            continue
        prefill = name.startswith("prefill")
        runs = [model.timings(prompt, tokens, cached=not prefill) for _ in range(arguments.rounds)]
        times = [whole if prefill else each for whole, each in runs]
        print(f"| {name} | {arguments.threads} | {min(times):.1f} ({statistics.median(times):.1f}) |", flush=True)


if __name__ == "__main__":
    main()
