"""What the CUDA kernels take, as Markdown, and whether a document still says so.

usage: cuda_resources.py table RESOURCES COUNTS [LAUNCHES]   the table; see ci/cuda-report.sh for what the files hold
       cuda_resources.py drift RESOURCES DOCUMENT            whether the document's registers and spills are the build's
"""

import collections
import sys

TARGETS = ["sm_80", "sm_90", "sm_90a"]
COUNTED = ["HGMMA", "HMMA", "UTMALDG", "multicast", "LDGSTS", "LDG", "LDS", "STS", "LDL, STL", "ACQBULK", "PREEXIT"]
# The last two are one column.
COLUMNS = [*COUNTED[:-2], "PDL"]


def rows(path):
    with open(path) as file:
        return [line.rstrip("\n").split("\t") for line in file if line.strip()]


def resources(path):
    """{(module, kernel): {target: (registers, bytes of registers that are spilled)}}"""
    found = collections.defaultdict(dict)
    for module, kernel, target, registers, _, _, stores, loads in rows(path)[1:]:
        found[module, kernel][target] = (registers, str(max(int(stores), int(loads))))
    return found


def joined(values):
    """One number where all targets have the same, else one a target."""
    return values[0] if len(set(values)) == 1 else " / ".join(values)


def cells(kernel, of_target, counts, launches):
    targets = sorted(of_target, key=TARGETS.index)
    threads, shared = launches.get(kernel, ("", ""))
    found = [threads, shared, joined([of_target[t][0] for t in targets]), joined([of_target[t][1] for t in targets])]
    of = [counts.get((kernel, t), ["0"] * len(COUNTED)) for t in targets]
    found += [joined([numbers[i] for numbers in of]) for i in range(len(COUNTED) - 2)]
    waits_starts = ["" if numbers[-2:] == ["0", "0"] else "+".join(numbers[-2:]) for numbers in of]
    return [*found, joined(waits_starts)]


def table(resources_path, counts_path, launches_path=None):
    counts = {(kernel, target): rest for kernel, target, *rest in rows(counts_path)}
    launches = {}
    for kernel, threads, shared, *_ in rows(launches_path) if launches_path else []:
        most = max(int(launches.get(kernel, ("", "0"))[1]), int(shared))
        launches[kernel] = (threads, str(most))
    of_module = collections.defaultdict(dict)
    for (module, kernel), of_target in resources(resources_path).items():
        of_module[module][kernel] = cells(kernel, of_target, counts, launches)
    for module, kernels in sorted(of_module.items()):
        print(f"\n## {module}.cu\n")
        print("| kernel | threads | shared | registers | spilled | " + " | ".join(COLUMNS) + " |")
        print("|---|" + "--:|" * (4 + len(COLUMNS)))
        for kernel, found in sorted(kernels.items()):
            if "_bf16" in kernel and kernels.get(kernel.replace("_bf16", "_f16")) == found:
                continue
            print(f"| `{kernel.removeprefix('moh_')}` | " + " | ".join(found) + " |")


def drift(resources_path, document):
    with open(document) as file:
        lines = [line for line in file if line.startswith("| `")]
    said = {}
    for line in lines:
        kernel, _, _, registers, spilled, *_ = [cell.strip() for cell in line.strip().strip("|").split("|")]
        said["moh_" + kernel.strip("`")] = (registers, spilled)
    wrong = []
    for (_, kernel), of_target in resources(resources_path).items():
        targets = sorted(of_target, key=TARGETS.index)
        found = tuple(joined([of_target[t][i] for t in targets]) for i in range(2))
        listed = said.pop(kernel, None) or said.get(kernel.replace("_bf16", "_f16"))
        if listed is None:
            print(f"cuda-report: note: {document} does not list {kernel}")
        elif listed != found:
            wrong.append(f"{kernel}: {document} says {listed[0]} registers, {listed[1]} spilled; the build has {found[0]}, {found[1]}")
    known = {kernel for _, kernel in resources(resources_path)}
    wrong += [f"{kernel}: {document} lists it, the build has no such kernel" for kernel in said if kernel not in known]
    for line in wrong:
        print(f"cuda-report: {line}", file=sys.stderr)
    if wrong:
        sys.exit("cuda-report: write it again: ci/cuda-report.sh --write")


if __name__ == "__main__":
    if len(sys.argv) < 4 or sys.argv[1] not in ("table", "drift"):
        sys.exit(__doc__)
    globals()[sys.argv[1]](*sys.argv[2:])
