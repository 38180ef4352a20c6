#!/usr/bin/env python3
"""Checks which crate depends on which, and prints a table of the crates.

usage: ci/layers.py [--quiet]

The rule is RULE below: the crates of this workspace that each crate may name in [dependencies] or [build-dependencies].
[dev-dependencies] are free. What a program needs besides its library, behind a default feature, is left out. The last column of
ARCHITECTURE.md's table must say the same. LIGHT lists the crates that must not link certain libraries, directly or through others.
RUNTIMES lists folders whose sources name no operator, so that a new operator needs no change there. Every dependency on others has a row in
docs/dependencies.md. Needs cargo; exits with 1 where a rule is broken.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

# Crate: the crates it may use. "?" = only as an optional dependency, behind a feature.
RULE = {
    "moh-models": ["moh-operators"],
    "moh-train": ["moh-models"],
    "moh-operators": [],
    "moh-cpu": ["moh-operators"],
    "moh-cuda": ["moh-operators"],
    "moh-conformance": ["moh-operators"],
    "moh-ops": ["moh-operators", "moh-cpu", "moh-cuda?"],
    "moh-tract": ["moh-operators", "moh-cpu"],
    "moh-runtime": ["moh-operators", "moh-tract"],
    "moh-export": ["moh-models", "moh-operators", "moh-runtime"],
    "moh-tasks": ["moh-runtime", "moh-operators", "moh-tract"],
    "moh-serve": ["moh-runtime", "moh-tasks"],
    "moh-run": ["moh-runtime", "moh-serve", "moh-tasks"],
}
# Tests and examples of the whole.
FREE = {"moh"}

# Crate: libraries that only tasks (moh-tasks) and the server (moh-serve) need, which must not be linked here.
TASK_LIBRARIES = {"tokenizers", "png", "zune-jpeg", "image-webp"}
SERVER_LIBRARIES = {"axum", "hyper", "tokio", "tonic", "tower", "utoipa", "metrics-exporter-prometheus"}
LIGHT = {
    "moh-export": TASK_LIBRARIES | SERVER_LIBRARIES,
    "moh-train": TASK_LIBRARIES | SERVER_LIBRARIES,
    "moh-ops": TASK_LIBRARIES | SERVER_LIBRARIES,
    "moh-tasks": SERVER_LIBRARIES,
    "moh-runtime": SERVER_LIBRARIES,
}
# What another project's crate brings along whether we want it or not.
NOT_OURS = {("candle-core", "tokenizers")}

# Sources that iterate the operators and know none by name; files of tests (tests.rs, tests/) apart.
RUNTIMES = ["custom-ops/ort/src", "custom-ops/tract/src", "runtime-ort/src"]
# File: operators that it may name. A product with a constant matrix, of any model, is one of these in tract.
KNOWN = {"custom-ops/tract/src/linear.rs": {"Linear", "RoutedProjection"}}
# Operators whose name says other things, too: only a line that also says where they are defined counts.
COMMON = {"Linear"}
# Where the rows of operators are: `module::Operator,` inside `operators! { .. }`.
OPERATORS = "custom-ops/operators/src/lib.rs"

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "ARCHITECTURE.md"
REVIEW = ROOT / "docs/dependencies.md"


def metadata():
    """What cargo knows of the workspace's libraries, for the platform it runs on."""
    host = next(
        line.split()[1] for line in output("rustc", "-vV").splitlines() if line.startswith("host:")
    )
    options = ["--locked", "--no-default-features", "--format-version", "1", "--filter-platform", host]
    return json.loads(output("cargo", "metadata", *options))


def output(*command):
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"layers: `{' '.join(command)}` failed")
    return result.stdout


def spelt(rule):
    """A rule's crates as messages and ARCHITECTURE.md name them."""
    return sorted(crate.replace("?", " (optional)") for crate in rule)


def named(crates):
    return ", ".join(sorted(crates)) or "none"


def direct(package, members):
    """Crates of the workspace that a crate names: name -> whether each mention is optional."""
    found = {}
    for dependency in package["dependencies"]:
        if dependency["kind"] != "dev" and dependency["name"] in members:
            found[dependency["name"]] = found.get(dependency["name"], True) and dependency["optional"]
    return found


def edges(graph, package):
    """The packages that `package` is built with, tests apart."""
    for dependency in graph[package]["deps"]:
        if any(kind["kind"] != "dev" for kind in dependency["dep_kinds"]):
            yield dependency["pkg"]


def tree(graph, names, start):
    """Everything that `start` is built with: package -> the package that brought it."""
    brought_by = {start: None}
    pending = [start]
    while pending:
        package = pending.pop()
        for dependency in edges(graph, package):
            if dependency not in brought_by and (names[package], names[dependency]) not in NOT_OURS:
                brought_by[dependency] = package
                pending.append(dependency)
    return brought_by


def chain(brought_by, names, package):
    """How a package came in: `moh-export -> moh-runtime -> png`."""
    found = []
    while package is not None:
        found.append(names[package])
        package = brought_by[package]
    return " -> ".join(reversed(found))


def check_direct(members):
    """Breaches of RULE."""
    for name in sorted(set(RULE) - set(members)):
        yield f"{name}: ci/layers.py has a rule for it, but the workspace has no such crate; take the rule out"
    for name, package in sorted(members.items()):
        if name in FREE:
            continue
        if name not in RULE:
            yield f"{name}: found in the workspace, but ci/layers.py has no rule for it; add one, and a row in ARCHITECTURE.md"
            continue
        allowed = {crate.rstrip("?") for crate in RULE[name]}
        only_optional = {crate.rstrip("?") for crate in RULE[name] if crate.endswith("?")}
        for other, optional in sorted(direct(package, members).items()):
            if other not in allowed:
                yield f"{name}: found a dependency on {other}; allowed: {named(spelt(RULE[name]))}"
            elif other in only_optional and not optional:
                yield f"{name}: found a dependency on {other} in every build; allowed: only an optional one"


def check_light(members, graph, names):
    """Breaches of LIGHT."""
    for name, forbidden in LIGHT.items():
        if name not in members:
            continue
        brought_by = tree(graph, names, members[name]["id"])
        for package in sorted(brought_by, key=lambda package: names[package]):
            if names[package] in forbidden:
                yield f"{name}: found {chain(brought_by, names, package)}; allowed: anything but {named(forbidden)}"


def check_page():
    """Rows of ARCHITECTURE.md's table of crates that differ from RULE."""
    rows = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[1] in RULE:
            rows[cells[1]] = sorted(cell.strip() for cell in cells[3].split(",") if cell.strip() not in ("", "-"))
    for name, allowed in RULE.items():
        expected = spelt(allowed)
        if name not in rows:
            yield f"{name}: ARCHITECTURE.md's table of crates has no row for it"
        elif rows[name] != expected:
            yield f"{name}: ARCHITECTURE.md says that it may use {named(rows[name])}; ci/layers.py says {named(expected)}"


def check_operators():
    """Breaches of RUNTIMES."""
    rows = re.search(r"^operators! \{$(.*?)^\}$", (ROOT / OPERATORS).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    spellings = {}
    for module, operator in re.findall(r"(\w+)::(\w+),", rows.group(1) if rows else ""):
        # As a type or a name in ONNX, and as a module: RoutedMlp is RoutedMLP in ONNX.
        spellings |= {module: operator, operator.lower(): operator}
    if not spellings:
        yield f"{OPERATORS}: found no rows in `operators! {{ .. }}`, from which ci/layers.py reads the operators' names"
    for folder in RUNTIMES:
        if not (ROOT / folder).is_dir():
            yield f"{folder}: ci/layers.py has a rule for it, but there is no such folder"
        for source in sorted((ROOT / folder).rglob("*.rs")):
            name = source.relative_to(ROOT).as_posix()
            if source.name == "tests.rs" or source.parent.name == "tests":
                continue
            for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), 1):
                found = {spellings.get(word.lower()) for word in re.findall(r"\w+", line)} - {None}
                if not re.search(r"moh_operators|ai\.moh", line):
                    found -= COMMON
                for operator in sorted(found - KNOWN.get(name, set())):
                    yield f"{name}:{number}: found the operator {operator}; expected no operator by name, only moh_operators::OPERATORS"


def check_review(members):
    """Dependencies on others that docs/dependencies.md has no row for, and rows of what nobody depends on."""
    used = {dependency["name"] for package in members.values() for dependency in package["dependencies"]} - set(members)
    rows = (line.split("|")[1] for line in REVIEW.read_text(encoding="utf-8").splitlines() if line.count("|") == 6)
    reviewed = {name.strip() for row in rows for name in row.split(",")} - {"crate", "---"}
    for name in sorted(used - reviewed):
        yield f"{name}: docs/dependencies.md has no row for this dependency; say there what it is for and why it is trusted"
    for name in sorted(reviewed - used):
        yield f"{name}: docs/dependencies.md has a row for it, and no crate depends on it; take it out"


def lines(folder, members):
    """Lines in a crate's Rust files, without those of crates in folders below."""
    others = {Path(package["manifest_path"]).parent for package in members.values()} - {folder}
    total = 0
    pending = [folder]
    while pending:
        for entry in pending.pop().iterdir():
            if entry.is_dir():
                if entry not in others and entry.name != "target" and not entry.name.startswith("."):
                    pending.append(entry)
            elif entry.suffix == ".rs":
                total += entry.read_bytes().count(b"\n")
    return total


def table(members, graph, names):
    """Crate, size, and what it depends on, as Markdown."""
    inside = {package["id"] for package in members.values()}
    print("| crate | lines of Rust | uses | external crates |\n|---|--:|---|--:|")
    order = list(RULE) + sorted(set(members) - set(RULE))
    for name in (name for name in order if name in members):
        package = members[name]
        size = lines(Path(package["manifest_path"]).parent, members)
        uses = [crate + (" (optional)" if optional else "") for crate, optional in direct(package, members).items()]
        # All that is compiled for it, what NOT_OURS excuses included.
        external, pending = set(), [package["id"]]
        while pending:
            for dependency in edges(graph, pending.pop()):
                if dependency not in external:
                    external.add(dependency)
                    pending.append(dependency)
        print(f"| {name} | {size} | {', '.join(uses) or '-'} | {len(external - inside)} |")


def main():
    data = metadata()
    names = {package["id"]: package["name"] for package in data["packages"]}
    inside = set(data["workspace_members"])
    members = {package["name"]: package for package in data["packages"] if package["id"] in inside}
    graph = {node["id"]: node for node in data["resolve"]["nodes"]}
    if "--quiet" not in sys.argv[1:]:
        table(members, graph, names)
    broken = [*check_direct(members), *check_light(members, graph, names), *check_page(), *check_review(members), *check_operators()]
    for breach in broken:
        print(f"layers: {breach}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
