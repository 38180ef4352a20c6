"""Spreads the pieces of a pack over calls, and prints what each carries.

usage: calls.py FOLDER BYTES     pieces FOLDER/NAME.ID.N.00, ... move to FOLDER/1, FOLDER/2, ...; a call takes BYTES with the source tree
"""

import os
import subprocess
import sys

# A call's stages, in order, and its minutes; pieces that a stage needs must have come by then.
CALLS = [("A", 5), ("B", 8), ("C", 7), ("D", 9), ("E", 9), ("F", 9), ("G", 10)]
# The stage that uses the pieces first.
NEEDED = {"moh-gpu": "A", "wheel": "B", "ort": "E"}
MIB = 1 << 20


def tree():
    """Bytes of the source tree: what git tracks, and what it does not ignore."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], capture_output=True, check=True).stdout
    return sum(os.lstat(name).st_size for name in listed.split(b"\0") if name and os.path.lexists(name))


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    folder, limit = sys.argv[1], int(sys.argv[2])
    source = tree()
    room = limit - source
    pieces = sorted(name for name in os.listdir(folder) if os.path.isfile(os.path.join(folder, name)))
    kind = lambda name: name.split(".")[0]
    pieces.sort(key=lambda name: (list(NEEDED).index(kind(name)), name))
    calls = [[] for _ in CALLS]
    size = lambda name: os.path.getsize(os.path.join(folder, name))
    for name in pieces:
        latest = next(i for i, (stage, _) in enumerate(CALLS) if stage == NEEDED[kind(name)])
        fits = [i for i in range(latest + 1) if sum(map(size, calls[i])) + size(name) <= room]
        if not fits:
            sys.exit(f"gpu: {name} ({size(name) / MIB:.1f} MiB) fits in no call before stage {CALLS[latest][0]}: {room / MIB:.1f} MiB are left beside the source tree")
        calls[fits[0]].append(name)
    print(f"\nsource tree {source / MIB:.1f} MiB; a call takes {limit / MIB:.0f} MiB, of which {room / MIB:.1f} MiB are left\n")
    for number, ((stage, minutes), names) in enumerate(zip(CALLS, calls, strict=True), 1):
        sizes = [(name, size(name)) for name in names]
        if names:
            os.makedirs(os.path.join(folder, str(number)))
        for name in names:
            os.rename(os.path.join(folder, name), os.path.join(folder, str(number), name))
        carried = ", ".join(f"{name} {bytes_ / MIB:.1f} MiB" for name, bytes_ in sizes)
        print(f"call {number}: carries {f'target/gpu/{number} ({carried})' if names else 'nothing'}, about {minutes} minutes:")
        print(f"    MOH_REQUIRE_CUDA=1 ci/gpu.sh --out DIR {stage}")
    print("\nOne call after the other on the same machine: what was carried is kept in MOH_GPU_HOME. On a new machine, carry all again:")
    print("    ci/gpu.sh --keep        after each part of it")
    print("Each stage leaves STAGE.jsonl, STAGE.md and STAGE-logs.tar.gz in DIR.")


if __name__ == "__main__":
    main()
