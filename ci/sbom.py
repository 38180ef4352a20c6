#!/usr/bin/env python3
"""Prints what moh-export, moh-run and libmoh_ops.so consist of, as a bill of materials: CycloneDX 1.6, in JSON.

usage: ci/sbom.py TARGET        (such as x86_64-unknown-linux-gnu)

The crates that are linked, with their versions, licences, checksums from Cargo.lock, and which needs which. The same commit gives the same
bytes: there is no time and no random number in it. Needs cargo.
"""

import json
import re
import subprocess
import sys
import uuid

from licences import ROOT, linked, shipped

# Of serial numbers that are made of what they are for.
SPACE = uuid.UUID("6ba7b811-9dad-11d1-80b4-00c04fd430c8")


def checksums():
    """SHA-256 of packages' archives, by name and version."""
    found = {}
    for package in (ROOT / "Cargo.lock").read_text().split("[[package]]")[1:]:
        fields = dict(re.findall(r'^(\w+) = "(.*)"$', package, re.MULTILINE))
        if "checksum" in fields:
            found[fields["name"], fields["version"]] = fields["checksum"]
    return found


def purl(package):
    return f"pkg:cargo/{package['name']}@{package['version']}"


def component(package, kind, sums):
    entry = {"type": kind, "bom-ref": purl(package), "name": package["name"], "version": package["version"], "purl": purl(package)}
    if package["license"]:
        # Old packages write a slash for "or".
        entry["licenses"] = [{"expression": re.sub(r"\s*/\s*", " OR ", package["license"])}]
    checksum = sums.get((package["name"], package["version"]))
    if checksum:
        entry["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    if package["repository"]:
        entry["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
    return entry


def main():
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    command = ["cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", sys.argv[1]]
    metadata = json.loads(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)
    sums = checksums()
    programs = sorted(shipped(metadata), key=lambda package: package["name"])
    crates = linked(metadata)
    packages = {package["id"]: package for package in metadata["packages"]}
    inside = {package["id"] for package in crates} | set(metadata["workspace_members"])
    of_workspace = [package for package in metadata["packages"] if package["id"] in metadata["workspace_members"]]
    needed, pending = set(), [package["id"] for package in programs]
    graph = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    needs = {}
    while pending:
        id = pending.pop()
        if id in needed:
            continue
        needed.add(id)
        used = [d["pkg"] for d in graph[id]["deps"] if d["pkg"] in inside and any(kind["kind"] is None for kind in d["dep_kinds"])]
        needs[id] = sorted({purl(packages[dependency]) for dependency in used})
        pending += used
    own = [package for package in of_workspace if package["id"] in needed]
    version = programs[0]["version"]
    name = {"type": "application", "bom-ref": "moh", "name": "moh", "version": version, "licenses": [{"license": {"id": "Apache-2.0"}}]}
    kinds = {package["id"]: "application" if package in programs else "library" for package in own}
    components = [component(package, kinds[package["id"]], sums) for package in sorted(own, key=lambda package: package["name"])]
    components += [component(package, "library", sums) for package in crates]
    dependencies = [{"ref": "moh", "dependsOn": [purl(package) for package in programs]}]
    dependencies += [{"ref": purl(packages[id]), "dependsOn": needs[id]} for id in sorted(needs, key=lambda id: purl(packages[id]))]
    bom = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": name, "properties": [{"name": "rust:target", "value": sys.argv[1]}]},
        "components": components,
        "dependencies": dependencies,
    }
    number = uuid.uuid5(SPACE, json.dumps(bom, sort_keys=True))
    print(json.dumps({**bom, "serialNumber": f"urn:uuid:{number}"}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
