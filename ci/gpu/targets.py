"""What the kernels must reach, and what they should: our time over the fastest dense peer's. See docs/cuda.md."""

# share of heads used: (must, goal)
LONG = {1.0: (1.30, 1.08), 0.75: (1.00, 0.80), 0.5: (0.72, 0.55)}
SHORT = {0.9: (1.10, 0.98), 0.75: (0.95, 0.82), 0.5: (0.72, 0.58)}
DECODE = {0.5: (0.60, 0.53)}
MODELS = {"dit": (0.95, 0.88), "llama": (0.95, 0.88)}

NAMES = {
    "long": "attention, T = 1k to 16k, 16k tokens, 2048 wide",
    "short": "attention, T = 256 and 512, 32 heads of 64",
    "decode": "decoding, 32 sequences, 8k keys, 32 KV heads",
    "models": "whole models in onnxruntime",
}


def attention(row):
    """(name, must, goal) of an attention row, or None where none is set."""
    if row.bias or row.cache and row.q_len > 1 or row.kv_heads != row.heads:
        return None
    if row.q_len == 1:
        target = "decode", DECODE.get(row.share)
        applies = (row.batch, row.kv_len, row.heads) == (32, 8192, 32)
    elif row.q_len >= 1024:
        target = "long", LONG.get(row.share)
        applies = row.q_len <= 16384 and row.batch * row.q_len == 16384 and row.heads * row.dim == 2048
    else:
        target = "short", SHORT.get(row.share)
        applies = row.q_len >= 256 and (row.heads, row.dim) == (32, 64)
    return (target[0], *target[1]) if applies and target[1] else None


def verdict(ratio, must, goal):
    """`goal`, `must` or `MISS`."""
    return "goal" if ratio <= goal else "must" if ratio <= must else "MISS"


# Relative distance of a model's outputs. In float16 a few tokens in ten thousand are routed to other heads, which moves their outputs.
DISTANCE = 0.1


def agree(distances):
    """Whether our outputs agree with the body's, or where that did not run with another's. A distance of NaN is none that agrees."""
    judges = [distances["body"]] if "body" in distances else distances.values()
    return any(distance <= DISTANCE for distance in judges)
