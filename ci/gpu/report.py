"""The tables of a stage, and whether our kernels passed.

usage: report.py FOLDER STAGE     reads FOLDER/STAGE.jsonl, writes FOLDER/STAGE.md, prints a summary

The exit status is 1 if a part failed or was killed, if a row is wrong, or if no part ran, except in a dry run. Left out parts beside others
are no failure: a machine may lack a tool. Ratios that miss their target are no failure either; they are listed.
"""

import os
import sys

import results
import targets

FAILED = ("FAILED", "WRONG")
OURS = "ours"


def show(cell):
    if isinstance(cell, float):
        return "nan" if cell != cell else f"{cell:.2g}" if cell < 1e-2 else f"{cell:.3f}"
    return "" if cell is None else str(cell)


def markdown(columns, rows):
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return lines + [f"| {' | '.join(show(cell) for cell in row)} |" for row in rows]


def median(row, name):
    time = row.get("ms", {}).get(name)
    return time["median"] if isinstance(time, dict) else time


def row_table(rows):
    """A table of a part's rows, with a column for each peer that any of them has."""
    peers = list(dict.fromkeys(name for row in rows for name in row.get("ms", {}) if name != OURS))
    peers += sorted({name for row in rows for name in row.get("missing", {})} - set(peers))
    columns = ["row", "status", "ours ms", *[f"{name} ms" for name in peers], "ratio", "must", "goal", "", "error", "MHz"]
    table = []
    for row in rows:
        cells = [median(row, name) if name in row.get("ms", {}) else "-" for name in (OURS, *peers)]
        said = row["status"] + (f": {row['reason']}" if row.get("reason") else "")
        kept = [row.get(field) for field in ("ratio", "must", "goal", "verdict", "error", "clock")]
        table.append([row["name"], said, *cells, *kept])
    reasons = sorted({f"{name}: {why}" for row in rows for name, why in row.get("missing", {}).items()})
    return [*markdown(columns, table), *(["", "Missing peers:"] if reasons else []), *[f"- {line}" for line in reasons]]


def target_table(rows):
    """For each target: how many rows reach it, and the row that is furthest from what it must reach."""
    table = []
    for key, title in targets.NAMES.items():
        judged = [row for row in rows if row.get("target") == key and row.get("verdict")]
        if not judged:
            continue
        count = lambda verdict: sum(row["verdict"] == verdict for row in judged)
        measured = [row for row in judged if isinstance(row.get("ratio"), float)]
        worst = max(measured, key=lambda row: row["ratio"] / row["must"], default=None)
        said = f"{worst['name']}: {worst['ratio']:.3f} (must {worst['must']}, goal {worst['goal']})" if worst else "dry run" if count("dry run") else ""
        table.append([title, len(judged), count("goal"), count("must"), count("MISS"), said])
    return markdown(["target", "rows", "reach the goal", "only what they must", "MISS", "worst row"], table) if table else []


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    folder, stage = sys.argv[1:]
    records = results.read(os.path.join(folder, stage + ".jsonl"))
    of = lambda kind: [record for record in records if record["record"] == kind]
    parts, rows = of("part"), of("row")
    part_table = markdown(["part", "outcome", "seconds", ""], [[p["part"], p["outcome"], p["seconds"], p.get("note", "")] for p in parts])
    dry = any(part.get("dry") for part in parts)
    title = f"Stage {stage}" + (": DRY RUN, nothing was measured" if dry else "")
    lines = [f"# {title}", "", *part_table]
    goals = target_table(rows)
    lines += ["", "## Targets: our time over the fastest dense peer's", "", *goals] if goals else []
    for name in dict.fromkeys(row["part"] for row in rows):
        lines += ["", f"## {name}", "", *row_table([row for row in rows if row["part"] == name])]
        lines += ["", *[f"Left out: {record['reason']}" for record in of("left out") if record["part"] == name]]
    lines += ["", "## Machine", "", *dict.fromkeys(str(record["machine"]) for record in of("machine"))]
    with open(os.path.join(folder, stage + ".md"), "w") as file:
        file.write("\n".join(lines) + "\n")

    wrong = [row for row in rows if row["status"] in FAILED]
    failed = [part for part in parts if part["outcome"] in ("FAILED", "killed")]
    missed = [row for row in rows if row.get("verdict") == "MISS"]
    print(f"\n{title}\n")
    print("\n".join(part_table))
    print("\n".join(["", *goals]))
    for heading, listed in [("misses", missed), ("wrong or failed", wrong)]:
        for row in listed[:15]:
            said = f"ratio {row['ratio']:.3f}, must {row['must']}" if heading == "misses" else f"{row['status']}: {row.get('reason')}"
            print(f"{heading}: {row['part']}: {row['name']}: {said}")
        if len(listed) > 15:
            print(f"{heading}: and {len(listed) - 15} more, in {stage}.md")
    for record in of("left out"):
        print(f"left out: {record['part']}: {record['reason']}")
    ran = [part for part in parts if part["outcome"] != "left out"]
    nothing = not parts or not (ran or dry)
    bad = bool(wrong or failed) or nothing
    print(f"\n{title}: {len(ran)} parts and {len(rows)} rows ran, {len(failed)} parts and {len(wrong)} rows FAILED, {len(parts) - len(ran)} parts left out" + (": NOTHING WAS RUN" if nothing else ""))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
