#!/usr/bin/env python3
"""Prints the licences of everything that is linked into moh-export, moh-run and libmoh_ops.so.

usage: ci/licences.py TARGET        (such as x86_64-unknown-linux-gnu)
       ci/licences.py --packages    prints the packages of the three, a line each

First the crates with their versions and licences, then each different text once, with the crates that it came with. Binaries must be
passed on together with it. Needs cargo.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

TARGETS = {("bin", "moh-export"), ("bin", "moh-run"), ("cdylib", "moh_ops")}
TEXT = re.compile(r"(licen[cs]e|copying|notice|unlicense|copyright)([-_.].*)?", re.IGNORECASE)
ROOT = Path(__file__).resolve().parent.parent


def shipped(metadata):
    """The packages of the programs and the library."""
    inside = set(metadata["workspace_members"])
    for package in metadata["packages"]:
        targets = {(kind, target["name"]) for target in package["targets"] for kind in target["kind"]}
        if package["id"] in inside and targets & TARGETS:
            yield package


def linked(metadata):
    """The external packages that the programs are linked with, sorted. Procedural macros are not linked."""
    packages = {package["id"]: package for package in metadata["packages"]}
    graph = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    pending = [package["id"] for package in shipped(metadata)]
    seen = set(pending)
    while pending:
        for dependency in graph[pending.pop()]["deps"]:
            id = dependency["pkg"]
            macro = any("proc-macro" in target["kind"] for target in packages[id]["targets"])
            if id not in seen and not macro and any(kind["kind"] is None for kind in dependency["dep_kinds"]):
                seen.add(id)
                pending.append(id)
    external = [packages[id] for id in seen if packages[id]["source"]]
    return sorted(external, key=lambda package: (package["name"], package["version"]))


def texts(package):
    """The licence files of a package."""
    folder = Path(package["manifest_path"]).parent
    for path in sorted(folder.iterdir()):
        if path.is_file() and TEXT.fullmatch(path.name) and path.suffix not in (".rs", ".toml"):
            yield path.read_text(encoding="utf-8", errors="replace").strip()


def main():
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    names_only = sys.argv[1] == "--packages"
    options = ["--no-deps"] if names_only else ["--filter-platform", sys.argv[1]]
    command = ["cargo", "metadata", "--locked", "--format-version", "1", *options]
    metadata = json.loads(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)
    if names_only:
        print(*sorted(package["name"] for package in shipped(metadata)), sep="\n")
        return 0
    packages = linked(metadata)
    print("moh-export, moh-run and libmoh_ops.so contain these crates, and Rust's standard library (MIT OR Apache-2.0):\n")
    # Text without its white space, because files of one licence differ in line breaks: the text, and the crates.
    found = {}
    for package in packages:
        name = f"{package['name']} {package['version']}"
        own = list(texts(package))
        note = "" if own else ", whose package has no text of it"
        print(f"{name}: {package['license']}{note}; {package['repository'] or package['homepage'] or 'crates.io'}")
        for text in own:
            found.setdefault("".join(text.split()), (text, []))[1].append(name)
    for text, names in found.values():
        print(f"\n{'=' * 100}\n{', '.join(dict.fromkeys(names))}\n{'-' * 100}\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
