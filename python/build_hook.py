"""Puts compiled files into the wheel, and names the machine that they are for. ci/wheel.sh compiles them."""

import os
from pathlib import Path
from typing import Any, Dict

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "MOH_ONNX_BINARIES"
FILES = ("moh-export", "moh-run", "libmoh_ops.so")
# What has to come with them where they are passed on.
LICENCES = "THIRD-PARTY-LICENCES.txt"
# What they consist of, for tools (PEP 770).
MATERIALS = "moh.cdx.json"
# ELF's e_machine, two bytes at offset 18.
MACHINES = {62: "x86_64", 183: "aarch64"}


def machine(path: Path) -> str:
    """The processor that an ELF file is for, as platform tags name it."""
    with path.open("rb") as file:
        head = file.read(20)
    number = int.from_bytes(head[18:20], "little")
    if head[:4] != b"\x7fELF" or number not in MACHINES:
        raise SystemExit(f"{path}: expected an ELF file for {' or '.join(MACHINES.values())}")
    return MACHINES[number]


class Binaries(BuildHookInterface):
    """Called by hatchling for each wheel."""

    def initialize(self, version: str, build_data: Dict[str, Any]) -> None:
        if version == "editable":
            raise SystemExit("an editable installation has no programs: install the wheel that ci/wheel.sh builds")
        folder = os.environ.get(VARIABLE)
        if not folder:
            raise SystemExit(f"{VARIABLE}: expected a folder with {', '.join(FILES)}; ci/wheel.sh compiles them and builds the wheel")
        found = {name: Path(folder).resolve() / name for name in FILES}
        missing = [str(path) for path in found.values() if not path.is_file()]
        if missing:
            raise SystemExit(f"{VARIABLE}: no file {', '.join(missing)}")
        machines = {machine(path) for path in found.values()}
        if len(machines) > 1:
            raise SystemExit(f"{folder}: expected files for one processor, found {' and '.join(sorted(machines))}")
        licences = Path(folder).resolve() / LICENCES
        files = [*found.values(), *([licences] if licences.is_file() else [])]
        build_data["force_include"] = {str(path): f"moh_onnx/bin/{path.name}" for path in files}
        materials = Path(folder).resolve() / MATERIALS
        if materials.is_file():
            build_data["sbom_files"].append(str(materials))
        build_data["pure_python"] = False
        # No Python is compiled against. The tag of a whole distribution family is auditwheel's to give.
        build_data["tag"] = f"py3-none-linux_{machines.pop()}"
