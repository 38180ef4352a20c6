#!/usr/bin/env python3
"""Compares the built working tree with another revision: ci/bench.sh --against builds the one and calls this.

Both sides run the same models in processes of their own, which take turns. The one whose turn it is not is stopped, because
threads that wait for work would take processors from the other. Processes are started several times for each row: where a
process happens to have its memory can make it some percent faster than an equal one.
"""

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path("target/against")
# Of one row.
STARTS = 3
LEAST_RUNS = 15
# A turn is so many calls, or as many as take this time: after the other's turn, caches are cold.
CALLS, TURN_SECONDS = 3, 0.01
# Longer calls find the caches as they leave them: one is a turn.
LONG_SECONDS = 0.3
# Rows are marked where the new side takes more than this times the old one's time.
MARK = 1.03


class Failed(Exception):
    pass


class Side:
    """A revision and where it was built."""

    def __init__(self, label, sources, build):
        self.label, self.programs = label, Path(build).absolute() / profile(sources)


class Worker:
    """A process with a loaded model, stopped while it is not its turn."""

    def __init__(self, side, case, way, threads):
        self.side = side
        sizes = [f"{symbol}={size}" for symbol, size in case["sizes"].items()]
        model = FOLDER / "models" / case["model"]
        command = [side.programs / "bench_worker", model, way, threads, case["share"], *sizes]
        self.process = subprocess.Popen(
            [str(part) for part in command],
            env={**os.environ, "MOH_OPS_LIBRARY": str(side.programs / "libmoh_ops.so")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait(self):
        """Its next line of output."""
        line = self.process.stdout.readline()
        if not line:
            raise Failed(f"{self.side.label} ended with code {self.process.wait()}")
        self.process.send_signal(signal.SIGSTOP)
        return line

    def run(self, calls):
        """Seconds of each call."""
        self.process.send_signal(signal.SIGCONT)
        try:
            print(calls, file=self.process.stdin, flush=True)
        except BrokenPipeError:
            pass
        return [float(word) for word in self.wait().split()]

    def warm_up(self):
        """Seconds that a call will take: the first one allocates, and takes several times as long."""
        [first] = self.run(1)
        return first if first > LONG_SECONDS else min(self.run(CALLS))

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def measure(sides, case, way, threads, seconds):
    """Seconds of each side's calls."""
    times = {side: [] for side in sides}
    for start in range(1, STARTS + 1):
        workers = []
        try:
            # Loading is not timed, but takes both processors.
            for side in sides if start % 2 else sides[::-1]:
                workers.append(Worker(side, case, way, threads))
                workers[-1].wait()
            longest = max(worker.warm_up() for worker in workers)
            calls = 1 if longest > LONG_SECONDS else min(100, max(CALLS, math.ceil(TURN_SECONDS / longest)))
            end = time.monotonic() + seconds / STARTS
            while time.monotonic() < end or len(times[sides[0]]) < LEAST_RUNS * start / STARTS:
                for worker in workers + workers[::-1]:
                    times[worker.side] += worker.run(calls)
        finally:
            for worker in workers:
                worker.end()
    return [times[side] for side in sides]


def cell(times):
    return f"{1e3 * min(times):.4g} ({1e3 * statistics.median(times):.4g})"


def table(sides, cases, threads, seconds):
    """Prints the table; gives whether all rows could be measured."""
    old, new = sides
    columns = ["case", "way", "threads", f"old {old.label} ms", f"new {new.label} ms", "new/old", "of medians"]
    rows = [(case, way, n) for case in cases for way in case["ways"] for n in threads]
    print("|", " | ".join(columns), "|")
    print("|" + "---|" * len(columns), flush=True)
    ratios = []
    for case, way, n in rows:
        row = [case["name"], way, str(n)]
        try:
            before, after = measure(sides, case, way, n, seconds)
        except Failed as error:
            print("|", " | ".join([*row, "failed", "failed", "", ""]), "|", flush=True)
            print(f"error: {', '.join(row)} threads: {error}", file=sys.stderr)
            continue
        ratio = min(after) / min(before)
        ratios.append((ratio, f"{row[0]}, {way}, threads: {n}"))
        shown = f"**{ratio:.3f}**" if ratio > MARK else f"{ratio:.3f}"
        medians = f"{statistics.median(after) / statistics.median(before):.3f}"
        print("|", " | ".join([*row, cell(before), cell(after), shown, medians]), "|", flush=True)
    if ratios:
        mean = math.exp(statistics.fmean(math.log(ratio) for ratio, _ in ratios))
        worst, where = max(ratios)
        slower = sum(ratio > MARK for ratio, _ in ratios)
        print(f"\nGeometric mean of new/old: {mean:.3f}. Worst: {worst:.3f} ({where}). Above {MARK}: {slower} of {len(ratios)}.")
    return len(ratios) == len(rows)


def git(*arguments):
    return subprocess.run(["git", *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def profile(sources):
    """The profile that is shipped: dist, or release before there was one."""
    return "dist" if "[profile.dist]" in (Path(sources) / "Cargo.toml").read_text() else "release"


def build(revision):
    """Builds the worker and the library with the sources of `revision`; gives the folders of sources and target."""
    source, built = FOLDER / "source", (FOLDER / "build").absolute()
    stamp = FOLDER / "revision"
    if not stamp.exists() or stamp.read_text().strip() != revision:
        stamp.unlink(missing_ok=True)
        shutil.rmtree(source, ignore_errors=True)
        source.mkdir(parents=True)
        # With the time of now (-m): cargo compiles what is newer than the last build, which may be one of another revision.
        archive = subprocess.Popen(["git", "archive", revision], stdout=subprocess.PIPE)
        subprocess.run(["tar", "-xm", "-C", source], stdin=archive.stdout, check=True)
        if archive.wait() != 0:
            raise Failed(f"git archive {revision} failed")
        stamp.write_text(revision)
    worker = Path("src/bin/bench_worker.rs")
    copy = source / worker
    copy.parent.mkdir(parents=True, exist_ok=True)
    if not copy.exists() or copy.read_bytes() != worker.read_bytes():
        shutil.copyfile(worker, copy)
    command = ["cargo", "build", "--profile", profile(source), "--locked", "--workspace"]
    subprocess.run(command, cwd=source, env={**os.environ, "CARGO_TARGET_DIR": str(built)}, check=True)
    return source, built


def main():
    parser = argparse.ArgumentParser(prog="ci/bench.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--against", metavar="REV", required=True)
    parser.add_argument("--seconds", type=float, default=3.0, help="for a row, at least; 15 runs of each side are made anyway")
    parser.add_argument("--only", metavar="TEXT", help="only cases whose name contains this")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--large", action="store_true", help="large models too")
    arguments = parser.parse_args()
    threads = [int(n) for n in arguments.threads.split(",")]

    revision = git("rev-parse", "--verify", f"{arguments.against}^{{commit}}")
    dirty = "+" if git("status", "--porcelain") else ""
    old = Side(git("describe", "--always", "--tags", revision), *build(revision))
    new = Side(git("describe", "--always", "--tags") + dirty, ".", "target")

    models = FOLDER / "models"
    shutil.rmtree(models, ignore_errors=True)
    models.mkdir()
    writer = [new.programs / "examples/bench", "--cases", models, "--threads", arguments.threads]
    writer += ["--only", arguments.only] if arguments.only else []
    writer += ["--large"] if arguments.large else []
    subprocess.run([str(part) for part in writer], check=True)
    cases = json.loads((models / "cases.json").read_text())
    if not cases["cases"]:
        raise Failed(f"no case's name contains {arguments.only}")

    onnxruntime = os.environ["ORT_DYLIB_PATH"].rpartition(".so.")[2]
    print(f"{new.label} against {old.label}, {time.strftime('%Y-%m-%d', time.gmtime())}, onnxruntime {onnxruntime}. {cases['machine']}\n")
    print(f"Shortest times (medians) in turns; new/old below 1: faster. Above {MARK} in bold.\n")
    return table([old, new], cases["cases"], threads, arguments.seconds)


if __name__ == "__main__":
    try:
        sys.exit(0 if main() else 1)
    except (Failed, subprocess.CalledProcessError, ValueError) as error:
        sys.exit(f"error: {error}")
