"""A row of a table: our kernel is checked, then timed in turns with its peers.

A peer may be missing. A failure of our kernel is a failure of the row, of its part and of its stage.
"""

import time
import traceback

import targets

# Relative error of a whole output or of a sample, as in moh_operators::tolerance::cuda_relative.
ALLOWED = {"f32": 1e-5, "f16": 2e-3, "bf16": 1e-2}
SETS = 8  # at most so many sets of inputs


class Case:
    """One set of inputs of a row.

    ours: launches our kernel. output: its output. bytes: of all tensors.
    reference(): raises Wrong, or returns the error of a sample of the output against float64.
    distance(result): relative error of the output against a peer's result; None where they compute different things.
    peers: {name: function that returns the result, or raises}. The one named "gathered" is no dense peer.
    """

    def __init__(self, ours, output, size, reference, peers, distance=None):
        self.ours, self.output, self.bytes, self.reference, self.peers = ours, output, size, reference, peers
        self.distance = distance


class Wrong(Exception):
    """Our kernel's result is wrong."""


class Broken(Exception):
    """The GPU takes no more work in this process."""


def reason(error):
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]


def check(device, case, dtype):
    """The error of our kernel's result. Every element must have been written: the output was NaN before."""
    device.synchronize()
    if not device.finite(case.output):
        raise Wrong("NaN: an element is not written, or not a number")
    error = case.reference()
    if not error <= ALLOWED[dtype]:
        raise Wrong(f"relative error {error:.2g} against float64")
    return error


def measure(device, row, build, quick):
    """The fields of a row's record. Raises Broken with them if the device works no more."""
    fields = {"name": row.name(), "row": vars(row), "status": "ok", "missing": {}}
    try:
        fill(device, row, build, quick, fields)
    except Wrong as error:
        fields |= {"status": "WRONG", "reason": str(error)}
    except Broken:
        raise
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        fields |= {"status": "FAILED", "reason": reason(error)}
    if not device.alive():
        fields |= {"reason": fields.get("reason", "") + " (the GPU takes no more work in this process)", "status": "FAILED"}
        raise Broken(fields)
    return fields


def fill(device, row, build, quick, fields):
    first = build(device, row)
    first.ours()
    fields["error"] = check(device, first, row.dtype)
    names = [name for name, peer in first.peers.items() if present(device, name, peer, fields["missing"])]
    distances = {name: first.distance(first.peers[name]()) for name in names} if first.distance else {}
    distances = {name: value for name, value in distances.items() if value is not None}
    # A peer may be wrong; ours is if it differs from all of them.
    if distances and not min(distances.values()) <= 2 * ALLOWED[row.dtype]:
        raise Wrong(f"differs from {distances}")
    # Inputs rotate, so that together they do not fit in L2.
    sets = [first]
    while len(sets) < SETS and len(sets) * first.bytes < 3 * device.l2_bytes:
        sets.append(build(device, row))
        sets[-1].ours()
        check(device, sets[-1], row.dtype)
    functions = {"ours": [case.ours for case in sets]} | {name: [case.peers[name] for case in sets] for name in names}
    for case in sets:
        device.poison(case.output)
    found = device.times(functions, rounds=9 if quick else 15)
    for case in sets:
        check(device, case, row.dtype)  # what the graph computed
    dense = [name for name in names if name != "gathered"]
    best = min(dense, key=lambda name: found[name]["median"], default=None)
    ratio = found["ours"]["median"] / found[best]["median"] if best else None
    fields |= {"sets": len(sets), "ms": found, "best": best, "ratio": ratio, "clock": device.clock()}
    target = row.target()
    if target:
        fields |= dict(zip(["target", "must", "goal"], target, strict=True))
        fields |= {"verdict": targets.verdict(ratio, *target[1:]) if ratio else "no peer"}
    if device.dry:
        # These are the times of an emulator: they must not look like results.
        fields |= {"status": "dry run", "ms": {name: "dry run" for name in found}, "ratio": "dry run" if best else None, "clock": None}
        fields |= {"verdict": "dry run"} if target else {}


def present(device, name, peer, missing):
    """Whether a peer takes this shape; if not, `missing` says why."""
    try:
        peer()
        device.synchronize()
    except Exception as error:  # noqa: BLE001
        missing[name] = reason(error)
        if not device.alive():
            raise RuntimeError(f"peer {name} broke the GPU: {missing[name]}") from error
        return False
    return True


def run(device, part, rows, build, results, quick, seconds):
    """Measures rows until the time is over. Returns whether ours passed in all of them."""
    deadline, passed = time.monotonic() + seconds, True
    for number, row in enumerate(rows):
        if time.monotonic() > deadline:
            results.add("left out", reason=f"{len(rows) - number} rows: the part's {seconds} s are over")
            print(f"{part}: time is over, {len(rows) - number} rows left out", flush=True)
            break
        device.seed(number)
        start = time.monotonic()
        try:
            fields = measure(device, row, build, quick)
        except Broken as error:
            fields = error.args[0]
        results.add("row", **fields, seconds=round(time.monotonic() - start, 2))
        print(f"{part}: {fields['name']}: {fields['status']} {fields.get('reason', '')} ratio {fields.get('ratio')}", flush=True)
        if fields["status"] in ("WRONG", "FAILED"):
            passed = False
        if fields.get("reason", "").endswith("in this process)"):
            results.add("left out", reason=f"{len(rows) - number - 1} rows after a failure of the GPU")
            break
    return passed
