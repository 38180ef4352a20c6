"""What the checks of serving stacks share: the checkpoints' expected results."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINTS = ROOT / "examples/checkpoints"


def greedy():
    """Prompt and greedy tokens of the language model, as PyTorch computed them: the prompt's tokens come first."""
    training = json.loads((CHECKPOINTS / "shakespeare-moh-llama/training.json").read_text())
    return training["prompt"], training["greedy_ids"]


def digits():
    """The held-out digits as pictures of 64 x 64 pixels, and their labels."""
    import numpy as np
    from PIL import Image
    from safetensors.numpy import load_file

    held_out = load_file(str(CHECKPOINTS / "digits-moh-vit/heldout.safetensors"))
    pixels = np.round(held_out["digits"] * (255 / 16)).astype(np.uint8)
    small = [Image.fromarray(digit, mode="L") for digit in pixels]
    pictures = [digit.resize((64, 64), Image.Resampling.BILINEAR).convert("RGB") for digit in small]
    return pictures, held_out["labels"].astype(int).tolist()


def report(name, passed, what):
    """Prints a line; ends the program with 1 where the check failed."""
    print(f"{'ok  ' if passed else 'FAIL'} {name}: {what}", flush=True)
    if not passed:
        sys.exit(1)


def equal(name, found, expected, whose="PyTorch's"):
    """Compares lists of tokens."""
    same = next((i for i, (a, b) in enumerate(zip(found, expected)) if a != b), min(len(found), len(expected)))
    report(name, list(found) == list(expected), f"{same} of {len(expected)} tokens equal {whose}")
