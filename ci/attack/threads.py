#!/usr/bin/env python3
"""The library under many threads, and with little memory. Needs onnxruntime and numpy; ci/attack/run.sh has them.

usage: threads.py LIBRARY MODEL [--seconds 60]

threads     64 threads on 4 sessions: every output is the one of a single thread, bit for bit
sessions    8 threads make sessions, run them once, and drop them: the same, and memory does not grow
memory      runs that need more memory than the process may have: an error status each, and the session runs on afterwards

MODEL is a folder with model.onnx. Prints a line each, and exits with 1 where one fails.
"""

import argparse
import os
import re
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort

ort.set_default_logger_severity(4)
TYPES = {"float": np.float32, "float16": np.float16, "int64": np.int64}
MiB = 1 << 20


def session(options, threads=2, arena=True):
    o = ort.SessionOptions()
    o.log_severity_level = 4
    o.intra_op_num_threads = threads
    o.enable_cpu_mem_arena = arena
    o.register_custom_ops_library(options.library)
    return ort.InferenceSession(str(Path(options.model) / "model.onnx"), o, providers=["CPUExecutionProvider"])


def feed(inputs, seed, batch=2, sequence=24):
    """Inputs of one run; sizes that the model leaves open are `batch`, then `sequence`, and no past."""
    rng, sizes, given = np.random.default_rng(seed), {}, {}
    for value in inputs:
        dims = []
        for dim in value.shape:
            if isinstance(dim, int):
                dims.append(dim)
            elif "batch" in dim:
                dims.append(batch)
            elif "past" in dim and "+" not in dim:
                dims.append(0)
            else:
                dims.append(sizes.setdefault(dim, sequence))
        kind = TYPES[re.search(r"\((\w+)\)", value.type).group(1)]
        if kind is np.int64:
            given[value.name] = np.ones(dims, kind) if "mask" in value.name else rng.integers(0, 60, dims)
        else:
            given[value.name] = rng.standard_normal(dims).astype(kind)
    return given


def resident():
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text()).group(1)) * 1024


def same(a, b):
    return all(np.array_equal(x, y, equal_nan=True) for x, y in zip(a, b))


def parallel(count, work, seconds):
    """Runs `work(i)` over and over in `count` threads; gives how often, and what went wrong."""
    end, runs, wrong = time.monotonic() + seconds, [0] * count, []

    def loop(i):
        try:
            while time.monotonic() < end and not wrong:
                problem = work(i)
                if problem:
                    wrong.append(problem)
                runs[i] += 1
        except Exception as error:  # noqa: BLE001 - reported
            wrong.append(repr(error))

    threads = [threading.Thread(target=loop, args=(i,)) for i in range(count)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return sum(runs), wrong


def many_threads(options):
    feeds = [feed(session(options, 1).get_inputs(), seed, sequence=8 + seed) for seed in range(8)]
    expected = [session(options, 1).run(None, given) for given in feeds]
    sessions = [session(options) for _ in range(4)]

    def work(i):
        which = np.random.randint(len(feeds))
        return None if same(sessions[i % 4].run(None, feeds[which]), expected[which]) else f"another result in thread {i}"

    parallel(64, work, min(5, options.seconds))
    before = resident()
    runs, wrong = parallel(64, work, options.seconds)
    return f"{runs} runs of 64 threads on 4 sessions, {(resident() - before) / MiB:+.1f} MiB", wrong + grown(before, 64)


def many_sessions(options):
    given = feed(session(options, 1).get_inputs(), 0)
    expected = session(options, 1).run(None, given)

    def work(_):
        return None if same(session(options).run(None, given), expected) else "another result"

    parallel(8, work, min(15, options.seconds))
    before = resident()
    runs, wrong = parallel(8, work, options.seconds)
    return f"{runs} sessions made and dropped by 8 threads, {(resident() - before) / MiB:+.1f} MiB", wrong + grown(before, 64)


def grown(before, limit):
    now = resident()
    return [f"memory grew from {before / MiB:.0f} to {now / MiB:.0f} MiB"] if now - before > limit * MiB else []


def little_memory(options):
    """In a child each, because a process that may have no more memory is of no use afterwards."""
    told, wrong = {}, []
    for extra in [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]:
        command = [sys.executable, __file__, options.library, options.model, "--child", str(extra)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        lines = done.stdout.split()
        if done.returncode != 0 or "panicked" in done.stderr or not lines:
            wrong.append(f"{extra} MiB: rc {done.returncode}: {done.stderr.strip()[-300:]}")
        else:
            told[lines[-1]] = told.get(lines[-1], 0) + 1
    if not wrong and (told.get("error", 0) < 3 or not told.get("result")):
        wrong.append(f"expected errors and results, found {told}")
    return f"runs with 1 to 256 MiB more than loaded: {told}", wrong


def child(options):
    running = session(options, 1, arena=False)
    small = feed(running.get_inputs(), 0)
    expected = running.run(None, small)
    large = feed(running.get_inputs(), 1, batch=8, sequence=200)
    size = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text()).group(1)) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (size + options.child * MiB, resource.RLIM_INFINITY))
    try:
        running.run(None, large)
        outcome = "result"
    except MemoryError:
        outcome = "error"
    except Exception as error:  # noqa: BLE001 - looked at
        outcome = "error" if "alloc" in str(error).lower() or "memory" in str(error).lower() else repr(error)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if not same(running.run(None, small), expected):
        outcome = "spoilt"
    print(outcome)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--child", type=int)
    options = parser.parse_args()
    if options.child is not None:
        return child(options)
    failed = False
    for name, attack in [("threads", many_threads), ("sessions", many_sessions), ("memory", little_memory)]:
        told, wrong = attack(options)
        failed |= bool(wrong)
        print(f"{'FAILED' if wrong else 'ok'} {name}: {told}{': ' if wrong else ''}{'; '.join(wrong[:5])}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
