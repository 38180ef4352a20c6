#!/usr/bin/env python3
"""Ends exports at every moment, and looks at what is left: the old model whole, the new one whole, or none.

usage: crash.py [--program target/release/moh-export] [--runs 300] [--only NAME]

A preloaded library (shim.c) counts the calls that change files. A run a call: killed there; the disk full from there on. So are exports of
several kinds treated, whatever else writes models, and trainings, which must go on from there as if nothing had been. Then signals at
random moments, exports into one folder at once, checkpoints that are written to while they are read, folders that are removed or cannot be
written to, and paths of all kinds. Needs cc, and Linux; mounting needs root, and is left out otherwise; trainings need the examples to be
built (cargo build --release --examples). Prints a line an attack.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHECKPOINT = HERE.parent.parent / "examples/checkpoints/shakespeare-moh-llama"
TRANSLATOR = {
    "family": "moa", "encoder_layers": 2, "decoder_layers": 2, "encoder_embed_dim": 16, "decoder_embed_dim": 16, "ffn_embed_dim": 32,
    "num_expert": 4, "attention_heads": 2, "head_dim": 8, "share_all_embeddings": True, "vocab_size": 20,
}
failures = []


def digest(folder):
    """What a model's files are, by name; nothing for what a killed run left hidden."""
    files = {}
    for path in sorted(folder.rglob("*")) if folder.exists() else []:
        name = path.relative_to(folder)
        # Its title is the checkpoint's folder.
        if path.is_file() and path.name != "README.md" and not any(part.startswith(".moh-export-") for part in name.parts):
            files[str(name)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return files


def hidden(folder):
    return [path.name for path in folder.rglob(".moh-export-*")] if folder.exists() else []


def is_none(found, whole):
    """Whether a file that is loaded is not there, and all others are of one model: of a translator, which is loaded as three, two do no harm."""
    loaded = {name for name in whole if name.endswith(".onnx")} or {name for name in whole if name.endswith(".safetensors")}
    there = loaded & set(found)
    return there < loaded and (not there or found.items() <= whole.items())


class Attack:
    """A program's way to make something in a folder, and what may be there afterwards."""

    def __init__(self, options, work):
        self.options, self.work = options, work
        self.shim = work / "shim.so"
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", self.shim, HERE / "shim.c", "-ldl"], check=True)
        self.sources = {}
        for name, theta in [("old", 10000.0), ("new", 20000.0)]:
            source = work / f"checkpoint-{name}"
            shutil.copytree(CHECKPOINT, source)
            config = json.loads((source / "config.json").read_text())
            config["rope_theta"] = theta
            (source / "config.json").write_text(json.dumps(config))
            self.sources[name] = source
        # A dense model, to be converted.
        self.dense = work / "checkpoint-dense"
        shutil.copytree(CHECKPOINT, self.dense)
        config = json.loads((self.dense / "config.json").read_text())
        config["family"] = "llama"
        (self.dense / "config.json").write_text(json.dumps(config))
        # Translators, of which three models are made at a time.
        (work / "translator.json").write_text(json.dumps(TRANSLATOR))
        for name, seed in [("old", "0"), ("new", "1")]:
            self.sources[f"translator-{name}"] = work / f"translator-{name}"
            subprocess.run(self.random(name, self.sources[f"translator-{name}"], seed), check=True, stdout=subprocess.DEVNULL)
        self.known = self.models_of(self.export)

    def models_of(self, way):
        """What the old and the new model are, of a way to make them."""
        known = {}
        for name in ["old", "new"]:
            out = self.work / f"known-{way.__name__}-{name}"
            if not out.exists():
                done = self.run(way(name, out))
                assert done.returncode == 0, done.stderr
            known[name] = digest(out)
        return known

    # Ways to make a model. Weights of other types or numbers, so that no file of the old one is a file of the new one.

    def export(self, name, out):
        dtype = "f32" if name == "old" else "f16"
        return [self.options.program, self.sources[name], "-o", out / "model.onnx", "--dtype", dtype, "--force", "--no-verify"]

    def quantised(self, name, out):
        how = ["int8"] if name == "old" else ["int4", "--form", "moh", "--cache", "in-place"]
        return [self.options.program, self.sources[name], "-o", out / "model.onnx", "--quantize", *how, "--force"]

    def linked(self, name, out):
        return [self.options.program, self.sources[name], "-o", out / "model.onnx", "--layout", "onnx", "--weights", "link", "--force"]

    def translator(self, name, out):
        return [self.options.program, self.sources[f"translator-{name}"], "--part", "both", "-o", out, "--force", "--no-verify"]

    def random(self, name, out, seed=None):
        seed = seed or str(["old", "new"].index(name) + 2)
        return [self.options.program, "random", self.work / "translator.json", "-o", out, "--seed", seed, "--force"]

    def convert(self, _, out):
        return [self.options.program, "convert", self.dense, "-o", out]

    def train(self, _, out):
        return [self.options.program.resolve().parent / "examples/translate_moa", out, "--steps", "2"]

    def environment(self, **crash):
        env = dict(os.environ, LD_PRELOAD=str(self.shim))
        env.update({f"CRASH_{name.upper()}": str(value) for name, value in crash.items()})
        return env

    def run(self, command, **crash):
        env = self.environment(**crash) if crash else None
        return subprocess.run(command, env=env, capture_output=True, text=True, errors="replace", timeout=120)

    def calls(self, command):
        count = self.work / "count"
        done = self.run(command, count=count)
        assert done.returncode == 0, done.stderr
        return int(count.read_text())

    def folder(self, old, way="export"):
        """A new output folder, with the old model or without."""
        out = Path(tempfile.mkdtemp(dir=self.work)) / "out"
        if old:
            shutil.copytree(self.work / f"known-{way}-old", out, symlinks=True)
        return out

    def model_is(self, out, allowed, what, done, known=None):
        """Checks that the model in `out` is one of `allowed`, or that there is none where that is allowed."""
        found, known = digest(out), known or self.known
        states = [name for name in allowed if name != "none" and found == known[name]]
        if not states and "none" in allowed and any(is_none(found, files) for files in known.values()):
            states = ["none"]
        if not states:
            report = {name: [n for n, files in known.items() if files.get(name) == sha] for name, sha in found.items()}
            fail(what, f"expected {allowed}, found files of {report}", done)
        return states[0] if states else "mixed"


def fail(what, problem, done=None):
    told = f"\n    rc {done.returncode}: {done.stderr.strip()[-400:]}" if done else ""
    failures.append(what)
    print(f"FAILED {what}: {problem}{told}", flush=True)


def line(attack, runs, states):
    print(f"| {attack} | {runs} | {', '.join(f'{count} {name}' for name, count in sorted(states.items()))} |", flush=True)


def count(states, state):
    states[state] = states.get(state, 0) + 1


def at_every_call(attack, way, how):
    """Killed, or without room, at each of the calls that change files; then again, which must mend it."""
    runs, states, known = 0, {}, attack.models_of(way)
    replaces = known["old"] != known["new"]
    for old in [True, False] if replaces else [False]:
        allowed = ["old", "new", "none"] if old else ["new", "none"]
        total = attack.calls(way("new", attack.folder(old, way.__name__)))
        for call in range(1, total + 1):
            out = attack.folder(old, way.__name__)
            done = attack.run(way("new", out), at=call, how=how)
            what = f"{way.__name__}, {how} at call {call} of {total}, {'with' if old else 'without'} an old model"
            state = attack.model_is(out, allowed, what, done, known)
            if how == "kill":
                if done.returncode != -signal.SIGKILL:
                    fail(what, "it was not killed", done)
                if not replaces:
                    shutil.rmtree(out, ignore_errors=True) if state == "none" else None
                again = attack.run(way("new", out)) if replaces or state == "none" else None
                if again and (again.returncode != 0 or digest(out) != known["new"] or hidden(out)):
                    fail(what, f"the next one did not mend it: {hidden(out)}", again)
            else:
                if done.returncode < 0 or "panicked" in done.stderr:
                    fail(what, "it crashed", done)
                if done.returncode == 0 and state != "new":
                    fail(what, "it says that it succeeded", done)
                if done.returncode > 0 and (state == "new" or not done.stderr.strip()):
                    fail(what, "it says that it failed, and there is the new model, or says nothing", done)
            count(states, state)
            runs += 1
            shutil.rmtree(out.parent, ignore_errors=True)
    line(f"{way.__name__}, {'SIGKILL' if how == 'kill' else 'no room on the disk from there on'} at every call that changes files", runs, states)


def trained(attack):
    """A training goes on from wherever it ended, to the same bytes."""
    program = attack.train("new", Path())[0]
    if not program.exists():
        print(f"| trainings | 0 | left out: {program} is not built |")
        return

    def weights(out):
        return {name: sha for name, sha in digest(out).items() if name.endswith((".safetensors", ".onnx", ".onnx_data"))}

    whole = attack.folder(False)
    total = attack.calls(attack.train("new", whole))
    expected, runs, states = weights(whole), 0, {}
    assert expected
    for how in ["kill", "full"]:
        for call in range(1, total + 1):
            out = attack.folder(False)
            done = attack.run(attack.train("new", out), at=call, how=how)
            what = f"training, {how} at call {call} of {total}"
            if how == "full" and (done.returncode < 0 or "panicked" in done.stderr or (done.returncode == 0 and weights(out) != expected)):
                fail(what, "it crashed, or says what is not so", done)
            again = attack.run(attack.train("new", out))
            if again.returncode != 0 or weights(out) != expected:
                fail(what, "the next one did not get to the same weights", again)
            count(states, "the same weights")
            runs += 1
            shutil.rmtree(out.parent, ignore_errors=True)
    line("a training, SIGKILL or no room at every call that changes files; then again", runs, states)


def signals(attack):
    """Signals at random moments of slow exports."""
    states = {}
    out = attack.folder(True)
    began = time.time()
    assert attack.run(attack.export("new", out), slow=3000).returncode == 0
    takes = time.time() - began
    for i in range(attack.options.runs):
        name = [signal.SIGKILL, signal.SIGINT, signal.SIGTERM][i % 3]
        out = attack.folder(True)
        child = subprocess.Popen(attack.export("new", out), env=attack.environment(slow=3000), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        time.sleep(random.uniform(0, 1.1 * takes))
        child.send_signal(name)
        child.stderr_text = child.communicate()[1]
        done = subprocess.CompletedProcess([], child.returncode, "", child.stderr_text)
        what = f"{name.name}, run {i}"
        state = attack.model_is(out, ["old", "new", "none"], what, done)
        if name != signal.SIGKILL and (hidden(out) or state == "none"):
            fail(what, f"left {hidden(out)}, model: {state}", done)
        count(states, state)
        shutil.rmtree(out.parent, ignore_errors=True)
    line("export, SIGKILL, SIGINT and SIGTERM at random moments", attack.options.runs, states)


def at_once(attack):
    """Two exports to one path."""
    states, runs = {}, max(attack.options.runs // 10, 10)
    for i in range(runs):
        out = attack.folder(i % 2 == 0)
        # Some microseconds more or less, so that they overlap in every way.
        children = [
            subprocess.Popen(attack.export(name, out), env=attack.environment(slow=random.randrange(20000)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for name in ["old", "new"]
        ]
        done = []
        for child in children:
            _, stderr = child.communicate()
            done.append(subprocess.CompletedProcess([], child.returncode, "", stderr))
        failed = [one for one in done if one.returncode != 0]
        state = attack.model_is(out, ["old", "new"], f"two at once, run {i}", (failed or done)[0])
        if len(failed) == 2 or hidden(out):
            fail(f"two at once, run {i}", f"both failed, or left {hidden(out)}", failed[0] if failed else None)
        count(states, state)
        shutil.rmtree(out.parent, ignore_errors=True)
    line("two exports to one path at once", runs, states)


def changed(attack):
    """A checkpoint that is written to while it is read."""
    states, runs = {}, max(attack.options.runs // 10, 10)
    for i in range(runs):
        source = Path(tempfile.mkdtemp(dir=attack.work)) / "checkpoint"
        shutil.copytree(attack.sources["new"], source)
        out = attack.folder(True)
        command = attack.export("new", out)
        command[1] = source
        child = subprocess.Popen(command, env=attack.environment(slow=20000), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        time.sleep(random.uniform(0, 0.6))
        weights = source / "model.safetensors"
        with weights.open("r+b") as file:
            file.seek(-random.randrange(1, weights.stat().st_size // 2), os.SEEK_END)
            file.truncate() if i % 3 == 0 else file.write(b"\xc0")
        _, stderr = child.communicate()
        done = subprocess.CompletedProcess([], child.returncode, "", stderr)
        what = f"a checkpoint that changes, run {i}"
        if done.returncode == 0:
            # Read before, as it was, or after, as it is.
            after = attack.folder(False)
            again = attack.export("new", after)
            again[1] = source
            now = attack.run(again)
            found = digest(out)
            if found != attack.known["new"] and (now.returncode != 0 or found != digest(after)):
                fail(what, "a model of old and new weights", done)
            state = "new"
        else:
            state = attack.model_is(out, ["old"], what, done)
            if "model.safetensors" not in done.stderr:
                fail(what, "the error does not name the file", done)
        count(states, state)
        shutil.rmtree(out.parent, ignore_errors=True)
        shutil.rmtree(source.parent, ignore_errors=True)
    line("a shard that is written to or cut while it is read", runs, states)


def removed(attack):
    """The output's folder is removed meanwhile."""
    states, runs = {}, max(attack.options.runs // 10, 10)
    for i in range(runs):
        out = attack.folder(True)
        child = subprocess.Popen(attack.export("new", out), env=attack.environment(slow=5000), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        time.sleep(random.uniform(0, 0.6))
        try:
            shutil.rmtree(out)
            met = False
        except OSError:
            # Files came while others were removed, new ones among them.
            met = True
        _, stderr = child.communicate()
        done = subprocess.CompletedProcess([], child.returncode, "", stderr)
        found = digest(out)
        if done.returncode < 0 or "panicked" in stderr:
            fail(f"a folder that is removed, run {i}", "it crashed", done)
        is_part = met and found.items() <= attack.known["new"].items()
        if done.returncode == 0 and not is_part and found not in ({}, attack.known["new"]):
            fail(f"a folder that is removed, run {i}", f"it says that it succeeded, and there is {sorted(found)}", done)
        count(states, "new" if found == attack.known["new"] else "error" if done.returncode else "removed afterwards")
        shutil.rmtree(out.parent, ignore_errors=True)
    line("the output's folder is removed meanwhile", runs, states)


def full_disks(attack):
    """Small disks, and one that cannot be written to."""
    if os.geteuid() != 0:
        print("| small disks | 0 | left out: mounting needs root |")
        return
    states, runs = {}, 0
    needs = sum(path.stat().st_size for path in (attack.work / "known-export-new").rglob("*") if path.is_file())
    disk = attack.work / "disk"
    disk.mkdir()
    for i in range(25):
        room = 64 * 1024 + int(needs * i / 20)
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", disk], capture_output=True)
        if mounted.returncode != 0:
            print("| small disks | 0 | left out: mounting is not allowed |")
            return
        try:
            out = disk / "out"
            done = attack.run(attack.export("new", out))
            what = f"a disk of {room} bytes"
            state = attack.model_is(out, ["new"] if done.returncode == 0 else ["none"], what, done)
            if done.returncode < 0 or (done.returncode and list(disk.iterdir())):
                fail(what, f"it crashed, or left {[str(p) for p in disk.rglob('*')]}", done)
            subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
            again = attack.run(attack.export("old", out))
            if again.returncode <= 0 or (state == "new" and digest(out) != attack.known["new"]):
                fail(f"{what} that cannot be written to", "expected an error, and the model as it was", again)
        finally:
            subprocess.run(["umount", disk], check=True)
        count(states, state)
        runs += 2
    line("disks of all sizes, and then read-only ones", runs, states)


def paths(attack):
    """Outputs and checkpoints under names of all kinds."""
    states, root = {}, Path(tempfile.mkdtemp(dir=attack.work))
    hub = root / "hub"
    (hub / "blobs").mkdir(parents=True)
    snapshot = hub / "snapshots/1234"
    snapshot.mkdir(parents=True)
    for file in attack.sources["new"].iterdir():
        shutil.copy(file, hub / "blobs" / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    (root / "linked").symlink_to(snapshot)
    latin = os.fsdecode(b"d\xe9j\xe0")
    deep = root / "/".join(["d" * 200] * 18)
    cases = [
        ("spaces", attack.sources["new"], root / "with spaces/and 'quotes'", True),
        ("not UTF-8", attack.sources["new"], root / latin, True),
        ("a snapshot of a hub", snapshot, root / "from-hub", True),
        ("a link to a folder", root / "linked", root / "from-link", True),
        ("3.6 kB deep", attack.sources["new"], deep, True),
        ("too deep", attack.sources["new"], deep / ("d" * 200) / ("e" * 200) / ("f" * 200), False),
        ("a name too long", attack.sources["new"], root / ("n" * 300), False),
    ]
    for name, source, out, works in cases:
        command = attack.export("new", out)
        command[1] = source
        done = attack.run(command)
        if (done.returncode == 0) != works or done.returncode < 0 or "panicked" in done.stderr:
            fail(f"paths: {name}", f"expected {'success' if works else 'an error'}", done)
        elif works and digest(out) != attack.known["new"]:
            fail(f"paths: {name}", "another model", done)
        count(states, "new" if done.returncode == 0 else "error")
    name = "m" * 250
    done = subprocess.run(
        [os.path.abspath(attack.options.program), os.path.relpath(attack.sources["new"], root), "-o", f"{name}.onnx", "--no-verify"],
        cwd=root, capture_output=True, text=True,
    )
    if done.returncode <= 0 or not done.stderr.strip() or hidden(root):
        fail("paths: a model's name that leaves no room for that of its data", "expected an error", done)
    count(states, "error")
    done = subprocess.run(
        [os.path.abspath(attack.options.program), os.path.relpath(attack.sources["new"], root), "-o", "model.onnx", "--dtype", "f16", "--no-verify"],
        cwd=root, capture_output=True, text=True,
    )
    if done.returncode != 0 or hashlib.sha256((root / "model.onnx").read_bytes()).hexdigest() != attack.known["new"]["model.onnx"]:
        fail("paths: relative", "expected the model", done)
    count(states, "new")
    line("paths: spaces, not UTF-8, links, deep, too long, relative", len(cases) + 2, states)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, default=Path("target/release/moh-export"))
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--only", action="append")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    ways = [Attack.export, Attack.quantised, Attack.linked, Attack.translator, Attack.random, Attack.convert]
    attacks = {
        f"{way.__name__}-{how}": lambda attack, way=way, how=how: at_every_call(attack, way.__get__(attack), how)
        for way in ways
        for how in ["kill", "full"]
    }
    attacks |= {
        "training": trained, "signals": signals, "at-once": at_once, "changed": changed, "removed": removed, "disks": full_disks, "paths": paths,
    }
    with tempfile.TemporaryDirectory(prefix="moh-crash-") as work:
        attack = Attack(options, Path(work))
        print("| attack | runs | what was there afterwards |\n|---|--:|---|")
        for name in options.only or attacks:
            attacks[name](attack)
    print(f"{len(failures)} failures")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
