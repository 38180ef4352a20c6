"""Prints the results of ort_check.py as one table, a column for each version.

usage: ort_table.py VERSION.tsv ...

Exits with 1 if a check failed, or its process died, or a file holds fewer checks than another.
"""

import sys
from pathlib import Path


def read(path):
    """Check -> (outcome, detail). A line without an outcome is the check that the process died in."""
    rows = (line.split("\t") + ["", ""] for line in Path(path).read_text().splitlines())
    return {row[0]: (row[1] or "DIED", row[2]) for row in rows if row[0]}


def main(paths):
    results = {Path(p).stem: read(p) for p in paths}
    names = list(dict.fromkeys(name for checks in results.values() for name in checks))
    width = max(map(len, names), default=5)
    print("check".ljust(width), *(version.ljust(8) for version in results))
    failures = []
    for name in names:
        cells = {version: checks.get(name, ("MISSING", "")) for version, checks in results.items()}
        print(name.ljust(width), *(outcome.ljust(8) for outcome, _ in cells.values()))
        failures += [(version, name, *cell) for version, cell in cells.items() if cell[0] not in ("ok", "skip")]
    for version, name, outcome, detail in failures:
        print(f"\n{outcome} in {version}: {name}: {detail}")
    counts = [sum(checks[name][0] == "ok" for name in checks) for checks in results.values()]
    print(f"\n{sum(counts)} ok, {len(failures)} failed")
    sys.exit(1 if failures or not names else 0)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1:])
