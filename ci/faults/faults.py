#!/usr/bin/env python3
"""Plants the faults of the lists beside this file, one at a time, and sees whether a test notices.

    faults.py check                  every fault's text is in its file once
    faults.py prepare                a copy of the tree with all faults behind a switch, built with its tests
    faults.py run [--only PATTERN]   all tests without a fault, then every fault that has no result yet
    faults.py table                  caught and planted by crate, and what survived

All faults are compiled in at once: a text `old` becomes `if MOH_FAULT is this one { new } else { old }`, so that a list of
hundreds costs one build. The tests of the faults' own crates run first, then the others that can reach them, the quickest first;
the first test that fails twice has caught it, as has a time limit. Results stand in the tree's `faults.json` and a run goes on
where it stopped.

A fault in the lists: `id`, `file`, `old`, `new`, `what` (what goes wrong, in words), `kind = "statement"` where the text is
statements instead of an expression, and `survives`, the reason, where it is right that no test notices.
"""

import argparse
import collections
import fnmatch
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]
LISTS = pathlib.Path(__file__).resolve().parent
# The kernels of CUDA need their own compiler; ci/test.sh runs their tests.
PACKAGES = ["--release", "--locked", "--workspace", "--exclude", "moh-cuda"]
FAILED = re.compile(r"^test (\S+)(?: - should panic)? \.\.\. FAILED")
# A fault may make a test wait for ever. Beside the time that it needs without one, because the machine may be busy.
PATIENCE = 90


def read_faults():
    faults = []
    for path in sorted(LISTS.glob("*.toml")):
        faults += tomllib.loads(path.read_text())["fault"]
    names = collections.Counter(fault["id"] for fault in faults)
    double = [name for name, times in names.items() if times > 1]
    if double:
        sys.exit(f"error: more than one fault is called {', '.join(double)}")
    return faults


def switch(fault):
    # The compiler may not cut the name up: `reached` looks for it.
    name = f'std::hint::black_box("{fault["id"]}")'
    test = f'std::env::var_os("MOH_FAULT").is_some_and(|fault| fault == {name})'
    condition = f"{{ static ON: std::sync::LazyLock<bool> = std::sync::LazyLock::new(|| {test}); *ON }}"
    text = f"if {condition} {{ {fault['new']} }} else {{ {fault['old']} }}"
    return text if fault.get("kind") == "statement" else f"({text})"


def plant(faults):
    """The text of each file that has faults, with all of them in it."""
    texts, wrong = {}, []
    by_file = collections.defaultdict(list)
    for fault in faults:
        by_file[fault["file"]].append(fault)
    for file, members in by_file.items():
        path = ROOT / file
        text = path.read_text() if path.is_file() else ""
        found = []
        for fault in members:
            if text.count(fault["old"]) != 1:
                wrong.append(f"{fault['id']}: expected its text once in {file}, found it {text.count(fault['old'])} times")
                continue
            found.append((text.index(fault["old"]), fault))
        found.sort(key=lambda entry: entry[0])
        for (start, first), (next_start, second) in zip(found, found[1:]):
            if start + len(first["old"]) > next_start:
                wrong.append(f"{first['id']} and {second['id']} overlap in {file}")
        for start, fault in reversed(found):
            text = text[:start] + switch(fault) + text[start + len(fault["old"]):]
        texts[file] = text
    if wrong:
        sys.exit("error: " + "\n       ".join(wrong))
    return texts


def prepare(tree, faults):
    texts = plant(faults)
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    kept = set()
    for file in filter(None, files):
        source, copy = ROOT / file, tree / file
        if not source.is_file():
            continue
        kept.add(file)
        wanted = texts[file].encode() if file in texts else source.read_bytes()
        # What has not changed is not touched: cargo goes by the time of change.
        if not copy.is_file() or copy.read_bytes() != wanted:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(wanted)
            copy.chmod(source.stat().st_mode)
    for folder, names, inside in os.walk(tree):
        names[:] = [name for name in names if name not in ("target", ".git")]
        for name in inside:
            path = pathlib.Path(folder, name)
            if path.suffix == ".rs" and str(path.relative_to(tree)) not in kept:
                path.unlink()
    # One commit for ever: another would build the library anew.
    env = os.environ | {"MOH_COMMIT": "unknown"}
    # The tests load the programs and the library from here.
    subprocess.run(["cargo", "build", *PACKAGES], cwd=tree, env=env, check=True)
    command = ["cargo", "test", *PACKAGES, "--no-run", "--message-format", "json-render-diagnostics"]
    out = subprocess.run(command, cwd=tree, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
    binaries = []
    for line in out.splitlines():
        message = json.loads(line)
        if message.get("reason") == "compiler-artifact" and message["profile"]["test"] and message["executable"]:
            folder = os.path.dirname(message["manifest_path"])
            crate = os.path.relpath(folder, tree)
            binaries.append({"crate": crate, "name": message["target"]["name"], "path": message["executable"], "folder": folder})
    (tree / "binaries.json").write_text(json.dumps(binaries, indent=1))
    print(f"{len(faults)} faults planted in {len(texts)} files, {len(binaries)} test programs")


def run_tests(binary, fault, limit, *arguments):
    """The first test that fails, "TIME" past the limit, "CRASH" where the program ends otherwise, or None."""
    env = os.environ | {
        "CARGO_MANIFEST_DIR": binary["folder"],
        "INSTA_UPDATE": "no",
        "INSTA_FORCE_PASS": "0",
        "MOH_REQUIRE_ORT": "1",
    }
    env.pop("MOH_FAULT", None)
    if fault:
        env["MOH_FAULT"] = fault
    process = subprocess.Popen(
        [binary["path"], *arguments],
        cwd=binary["folder"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    late = threading.Event()

    def stop():
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def expire():
        late.set()
        stop()

    timer = threading.Timer(limit, expire)
    timer.start()
    failed, code = None, 0
    for line in process.stdout:
        found = FAILED.match(line)
        if found:
            failed = found[1]
            break
    else:
        code = process.wait()
    timer.cancel()
    # Also what the tests started.
    stop()
    process.wait()
    if failed is None and late.is_set():
        return "TIME"
    return failed or (None if code == 0 else "CRASH")


def reached(tree, binaries, faults):
    """The faults that each test program has in it, or a program or library of ours that it may start or load."""
    names = [fault["id"].encode() for fault in faults]
    built = {}
    for path in (tree / "target/release").iterdir():
        if path.is_file() and path.suffix in ("", ".so") and not path.name.startswith("."):
            content = path.read_bytes()
            built[path.name.encode()] = {name for name in names if name in content}
    reach = {}
    for binary in binaries:
        content = pathlib.Path(binary["path"]).read_bytes()
        found = {name for name in names if name in content}
        reach[binary["path"]] = found.union(*(inside for name, inside in built.items() if name in content))
    return reach


def catch(fault, binaries):
    """The first test that notices a fault."""
    for binary in binaries:
        limit = 3 * binary["seconds"] + PATIENCE
        # A test that fails by chance hides those after it: the program then runs once more.
        for _ in range(3):
            test = run_tests(binary, fault["id"], limit)
            if test is None:
                break
            # Chance fails no test twice.
            again = [test, "--exact"] if test not in ("TIME", "CRASH") else []
            if run_tests(binary, fault["id"], limit, *again) is not None:
                return f"{binary['crate']} {binary['name']}: {test}"
    return None


def run(tree, faults, only):
    known = tree / "binaries.json"
    binaries = json.loads(known.read_text())
    for binary in binaries:
        if "seconds" not in binary:
            start = time.monotonic()
            failed = run_tests(binary, None, 3600)
            if failed:
                sys.exit(f"error: {binary['crate']} {binary['name']} fails without any fault: {failed}")
            binary["seconds"] = time.monotonic() - start
            known.write_text(json.dumps(binaries, indent=1))
    binaries.sort(key=lambda binary: binary["seconds"])
    print(f"without a fault: all tests pass, {sum(binary['seconds'] for binary in binaries):.0f} s", flush=True)

    path = tree / "faults.json"
    results = json.loads(path.read_text()) if path.is_file() else {}

    def chosen(fault):
        if only:
            return fnmatch.fnmatch(fault["id"], only)
        # A fault that was changed is another one.
        return results.get(fault["id"], {}).get("text") != [fault["old"], fault["new"]]

    open_faults = [fault for fault in faults if chosen(fault)]
    reach = reached(tree, binaries, open_faults)
    # Most are caught at home.
    for home in (True, False):
        for fault in list(open_faults):
            crate = fault["file"].split("/src/")[0]
            start = time.monotonic()
            able = [binary for binary in binaries if fault["id"].encode() in reach[binary["path"]]]
            test = catch(fault, [binary for binary in able if (binary["crate"] == crate) == home])
            print(f"{time.monotonic() - start:5.0f} s  {fault['id']}: {test or ('-' if home else 'NOT CAUGHT')}", flush=True)
            if test or not home:
                open_faults.remove(fault)
                results[fault["id"]] = {"text": [fault["old"], fault["new"]], "test": test}
                partial = path.with_suffix(".part")
                partial.write_text(json.dumps(results, indent=1))
                partial.replace(path)


def table(tree, faults):
    results = json.loads((tree / "faults.json").read_text())
    planted, caught, alive = collections.Counter(), collections.Counter(), []
    for fault in faults:
        result = results.get(fault["id"])
        if not result or result["text"] != [fault["old"], fault["new"]]:
            continue
        crate = fault["file"].split("/src/")[0]
        planted[crate] += 1
        caught[crate] += result["test"] is not None
        if result["test"] is None:
            alive.append(fault)
    print("| crate | planted | caught |\n|---|---|---|")
    for crate in sorted(planted):
        print(f"| {crate} | {planted[crate]} | {caught[crate]} |")
    total = sum(planted.values())
    print(f"| all | {total} | {sum(caught.values())} ({100 * sum(caught.values()) / max(total, 1):.1f} %) |")
    if total < len(faults):
        print(f"\n{len(faults) - total} faults have no result yet")
    for fault in alive:
        print(f"\n{fault['id']} ({fault['file']}): {fault['what']}\n    {fault.get('survives', 'no reason is given')}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["check", "prepare", "run", "table"])
    parser.add_argument("--tree", type=pathlib.Path, default=ROOT / "target/faults/tree", help="where the copy is")
    parser.add_argument("--only", metavar="PATTERN", help="run: the faults of these names (shell pattern), known or not")
    arguments = parser.parse_args()
    faults, tree = read_faults(), arguments.tree.resolve()
    if arguments.command == "check":
        plant(faults)
        print(f"{len(faults)} faults, each text is there once")
    elif arguments.command == "prepare":
        prepare(tree, faults)
    elif arguments.command == "run":
        run(tree, faults, arguments.only)
    else:
        table(tree, faults)


if __name__ == "__main__":
    main()
