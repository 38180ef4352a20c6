"""Whether targets.py and report.py judge known ratios as docs/cuda.md says, and set the exit status. Run by ci/gpu.sh --dry-run."""

import os
import subprocess
import sys
import tempfile

import attention
import targets
from results import Results

# (row, its target)
TARGETS = [
    (attention.prefill("f16", 1024, 64, False, 0.75), ("long", 1.00, 0.80)),
    (attention.prefill("bf16", 16384, 128, True, 1.0), ("long", 1.30, 1.08)),
    (attention.prefill("f16", 256, 64, True, 0.9), ("short", 1.10, 0.98)),
    (attention.prefill("f16", 512, 64, False, 0.5), ("short", 0.72, 0.58)),
    (attention.Attention("f16", 32, 1, 8192, 32, 32, 64, True, 0.5, cache=True), ("decode", 0.60, 0.53)),
    (attention.Attention("f16", 32, 1, 8192, 32, 8, 128, True, 0.5, cache=True), None),
    (attention.prefill("f16", 512, 128, False, 0.5), None),
    (attention.prefill("f16", 1024, 64, False, 0.75, bias="shared"), None),
]
# (ratio, verdict) for must 1.00, goal 0.80
VERDICTS = [(0.80, "goal"), (0.81, "must"), (1.00, "must"), (1.01, "MISS")]

NAN = float("nan")
# (distances, whether the outputs agree)
DISTANCES = [
    ({"body": 0.01}, True),
    ({"body": 0.2}, False),
    ({"body": 0.2, "fused": 0.01, "gemm": 0.01}, False),
    ({"body": NAN, "fused": 0.01}, False),
    ({"body": 0.01, "fused": NAN, "gemm": 3.0}, True),
    ({"fused": NAN, "gemm": 0.01}, True),
    ({"fused": 0.01, "gemm": NAN}, True),
    ({"fused": NAN}, False),
    ({"fused": 0.2, "gemm": NAN}, False),
    ({}, False),
]


def report(folder, *records):
    """The report's exit status and words."""
    path = os.path.join(folder, "T.jsonl")
    if os.path.exists(path):
        os.remove(path)
    results = Results(path, stage="T", part="p")
    for kind, fields in records:
        results.add(kind, **fields)
    with open(path, "a") as file:
        file.write('{"record": "row", "cut o')
    program = [sys.executable, os.path.join(os.path.dirname(os.path.abspath(__file__)), "report.py"), folder, "T"]
    found = subprocess.run(program, capture_output=True, text=True)
    return found.returncode, found.stdout + found.stderr


def main():
    for row, expected in TARGETS:
        assert row.target() == expected, (row.name(), row.target(), expected)
    for ratio, expected in VERDICTS:
        assert targets.verdict(ratio, 1.00, 0.80) == expected, (ratio, expected)
    for distances, expected in DISTANCES:
        assert targets.agree(distances) is expected, (distances, expected)
    time = {"median": 2.0, "min": 2.0, "max": 2.0}
    row = {"status": "ok", "ms": {"ours": time, "FA3": time}, "ratio": 1.01, "target": "long", "must": 1.0, "goal": 0.8, "verdict": "MISS"}
    part = ("part", {"outcome": "passed", "seconds": 1})
    with tempfile.TemporaryDirectory() as folder:
        code, said = report(folder, ("row", row | {"name": "slow"}), ("row", row | {"name": "fast", "ratio": 0.7, "verdict": "goal"}), part)
        assert code == 0 and "| 2 | 1 | 0 | 1 | slow: 1.010 (must 1.0, goal 0.8) |" in said, said
        left_out = ("part", {"outcome": "left out", "seconds": 0})
        for outcome in ("FAILED", "killed"):
            code, said = report(folder, ("part", {"outcome": outcome, "seconds": 1}))
            assert code == 1, (outcome, code, said)
        for records, expected in [([left_out, part], 0), ([left_out], 1), ([left_out, left_out], 1), ([], 1)]:
            code, said = report(folder, *records)
            assert code == expected and ("NOTHING WAS RUN" in said) == (expected == 1), (records, code, said)
        code, said = report(folder, ("part", left_out[1] | {"dry": True}))
        assert code == 0, said
        for status in ("WRONG", "FAILED"):
            code, said = report(folder, ("row", row | {"name": "bad", "status": status}), part)
            assert code == 1, (status, said)


if __name__ == "__main__":
    main()
