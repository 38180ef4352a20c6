"""The launches of one call of each operator, in order, as Markdown: cuda_launches.py LIBRARY

LIBRARY is libmoh_cuda.so, and MOH_CUDA_DRIVER the emulator, which logs each launch. The number does not depend on gates. Calls are small
and in f16; the kernels are those for Hopper, and those before it.
"""

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "gpu"))
from moh_cuda import Kernels  # noqa: E402

HEADS, TOKENS, DIM = 4, 40, 64
WIDTH = HEADS * DIM
GATES = ("f32", (1, TOKENS, HEADS))


def half(*shape):
    return ("f16", shape)


ATTENTION = dict(num_heads=HEADS, kv_num_heads=HEADS, scale=0.125, is_causal=1)
QUERY = half(1, TOKENS, WIDTH)
CACHE, LONG_CACHE = half(1, HEADS, 70, DIM), half(1, HEADS, 900, DIM)
PATCHES = [QUERY] * 3 + [half(1, 9, WIDTH)] * 2
TABLES = [half(HEADS, DIM), ("f32", (TOKENS, HEADS)), half(HEADS, 9), half(HEADS, TOKENS, 9), half(HEADS, DIM, 9), half(HEADS, 9)]
PRODUCT = dict(num_heads=HEADS, weight_layout=0)
INT4 = dict(bits=4, block_size=32, accuracy_level=0)
TOKEN, TOKEN_GATES, STARTS = half(1, 1, WIDTH), ("f32", (1, 1, HEADS)), [("i64", (1,))] * 2
CACHED = dict(num_heads=HEADS, kv_num_heads=HEADS, scale=0.125)


def quantised(*shape):
    """A matrix of int4 in blocks of 32, and its scales."""
    *rows, depth = shape
    return [("u8", (*rows, depth // 32, 16)), half(*rows, depth // 32)]


# (what, operator, attributes, inputs, output)
CALLS = [
    ("prefill", "RoutedAttention", ATTENTION, [QUERY] * 3 + [GATES], QUERY),
    ("one query, 70 keys", "RoutedAttention", ATTENTION, [half(1, 1, WIDTH), CACHE, CACHE, ("f32", (1, 1, HEADS))], half(1, 1, WIDTH)),
    ("one query, 900 keys", "RoutedAttention", ATTENTION, [half(1, 1, WIDTH), LONG_CACHE, LONG_CACHE, ("f32", (1, 1, HEADS))], half(1, 1, WIDTH)),
    ("one matrix", "RoutedProjection", PRODUCT, [QUERY, half(WIDTH, WIDTH), GATES], QUERY),
    ("one matrix", "RoutedCombine", PRODUCT, [QUERY, half(WIDTH, WIDTH), GATES], QUERY),
    ("SiLU", "RoutedMLP", dict(num_experts=HEADS, activation=3), [QUERY, half(HEADS, WIDTH, 128), half(HEADS, 128, WIDTH), GATES], QUERY),
    (
        "5 x 8 patches",
        "RoutedAggregatedAttention",
        dict(num_heads=HEADS, height=5, width=8, window=3),
        [*PATCHES, GATES, *TABLES],
        QUERY,
    ),
    ("softmax over all heads", "TopKRouter", dict(kind=1, num_heads=HEADS, top_k=2, shared_heads=""), [half(1, TOKENS, HEADS)], GATES),
    ("one token", "RoutedProjectionNBits", dict(num_heads=HEADS, **INT4), [TOKEN, *quantised(WIDTH, WIDTH), TOKEN_GATES], TOKEN),
    ("40 tokens", "RoutedProjectionNBits", dict(num_heads=HEADS, **INT4), [QUERY, *quantised(WIDTH, WIDTH), GATES], QUERY),
    ("one token", "RoutedCombineNBits", dict(num_heads=HEADS, **INT4), [TOKEN, *quantised(WIDTH, WIDTH), TOKEN_GATES], TOKEN),
    ("40 tokens", "RoutedCombineNBits", dict(num_heads=HEADS, **INT4), [QUERY, *quantised(WIDTH, WIDTH), GATES], QUERY),
    (
        "one token, SiLU",
        "RoutedMLPNBits",
        dict(num_experts=HEADS, activation=3, **INT4),
        [TOKEN, *quantised(HEADS, 128, WIDTH), *quantised(HEADS, WIDTH, 128), TOKEN_GATES],
        TOKEN,
    ),
    ("one token", "LinearNBits", INT4, [TOKEN, *quantised(WIDTH, WIDTH)], TOKEN),
    ("40 tokens", "LinearNBits", INT4, [QUERY, *quantised(WIDTH, WIDTH)], QUERY),
    ("one token", "LinearActivationNBits", dict(activation=2, **INT4), [TOKEN, *quantised(WIDTH, WIDTH)], TOKEN),
    ("40 tokens", "LinearActivationNBits", dict(activation=2, **INT4), [QUERY, *quantised(WIDTH, WIDTH)], QUERY),
    ("40 tokens", "Linear", {}, [QUERY, half(WIDTH, WIDTH)], QUERY),
    ("40 tokens", "LinearActivation", {"activation": 2}, [QUERY, half(WIDTH, WIDTH)], QUERY),
    ("40 tokens", "LayerNorm", {"epsilon": 1e-5}, [QUERY, half(WIDTH)], QUERY),
    (
        "5 x 8 pixels",
        "DepthwiseConv",
        {"channels": WIDTH, "activation": 1},
        [half(1, 5, 8, WIDTH), half(WIDTH, 1, 3, 3)],
        half(1, 5, 8, WIDTH),
    ),
    ("40 tokens", "CacheUpdate", {}, [LONG_CACHE, QUERY, ("i64", (1, 900)), ("i64", (1,))], LONG_CACHE),
    ("one query", "RoutedCachedAttention", CACHED, [TOKEN, LONG_CACHE, LONG_CACHE, TOKEN_GATES, *STARTS], TOKEN),
    ("40 queries", "RoutedCachedAttention", CACHED, [QUERY, LONG_CACHE, LONG_CACHE, GATES, *STARTS], QUERY),
]


def tensor(described):
    """Memory with ones in float32 and zeros in other types, and what C gets of it: (address, type, shape)."""
    dtype, shape = described
    count = 1
    for dim in shape:
        count *= dim
    size = count * {"u8": 1, "f16": 2, "f32": 4, "i64": 8}[dtype]
    memory = (ctypes.c_char * (size + 256))()
    address = ctypes.addressof(memory)
    address += -address % 256
    if dtype == "f32":
        (ctypes.c_float * count).from_address(address)[:] = [1.0] * count
    return memory, (address, dtype, shape)


def launched(kernels, log, operator, attributes, inputs, output):
    """The kernels' names, in order."""
    made = [tensor(one) for one in [*inputs, output]]
    room = tensor(("f32", (1 << 20,)))
    if os.path.exists(log):
        os.remove(log)
    kernels.call(operator, attributes, [one for _, one in made[:-1]], made[-1][1], (room[1][0], 4 << 20))(0)
    with open(log) as file:
        return [line.split("\t")[0].removeprefix("moh_") for line in file]


def rows(library):
    """One line a call: what, operator, kernels in order, with tabs."""
    kernels = Kernels(library)
    log = os.environ["MOH_EMULATOR_LOG"]
    for what, operator, *call in CALLS:
        print(operator, what, " ".join(launched(kernels, log, operator, *call)), sep="\t")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--rows", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rows:
        rows(options.library)
        return
    print("\n## Launches of one call\n\n| operator | call | GPU | launches | kernels |\n|---|---|---|--:|---|")
    with tempfile.TemporaryDirectory() as folder:
        # The capability is read once a process.
        for gpu, capability in [("Hopper", {}), ("8.0", {"MOH_CUDA_CAPABILITY": "80"})]:
            environment = os.environ | {"MOH_EMULATOR_LOG": os.path.join(folder, "log")} | capability
            program = [sys.executable, os.path.abspath(__file__), options.library, "--rows"]
            said = subprocess.run(program, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
            for line in said.splitlines():
                operator, what, names = line.split("\t")
                listed = names.split()
                print(f"| {operator} | {what} | {gpu} | {len(listed)} | {', '.join(f'`{name}`' for name in listed)} |")


if __name__ == "__main__":
    main()
