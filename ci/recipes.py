"""Runs the code blocks of a page, in order. ci/recipes.sh prepares what they need.

usage: recipes.py PAGE FOLDER [--torch]

A recipe is a section (`## Title`). Its ```bash blocks are run. So are its ```python blocks, except those that begin
with `# NAME.py`: they are saved under that name. Each block is a process of its own in FOLDER. Comments of the page
change this:

    <!-- recipes: needs COMMAND -->   the section is left out where there is no such command; torch: without --torch
    <!-- recipes: fails REASON -->    the next block is expected to fail; if it does not, the comment has to go
"""

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

TIMEOUT = 1800  # seconds a block: pip may fetch PyTorch
LINES = 30  # of a failed block's output


class Failed(Exception):
    """A block that failed, or that should have."""


def sections(page):
    """Title, what the section needs, and blocks: line, language, text, reason why it is expected to fail."""
    title, needs, blocks, fails = "What all recipes need", [], [], None
    lines = page.read_text().split("\n")
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if line.startswith("## "):
            yield title, needs, blocks
            title, needs, blocks, fails = line[3:], [], [], None
        elif comment := re.fullmatch(r"<!-- recipes: (\w+) (.+) -->", line):
            if comment[1] == "needs":
                needs.append(comment[2])
            elif comment[1] == "fails":
                fails = comment[2]
            else:
                raise SystemExit(f"{page}:{at}: unknown comment: {line}")
        elif fence := re.fullmatch(r"```(\w+)", line):
            end = lines.index("```", at)
            blocks.append((at, fence[1], "\n".join(lines[at:end]) + "\n", fails))
            at, fails = end + 1, None
        elif line.startswith(("```", "<!-- recipes")):
            raise SystemExit(f"{page}:{at}: not understood: {line}")
    yield title, needs, blocks


def run(folder, line, language, text, fails):
    """Runs one block. Returns a note."""
    if language == "python":
        name = re.match(r"# (\w+\.py)\n", text)
        path = folder / (name[1] if name else f"block_{line}.py")
        path.write_text(text)
        if name:
            return ""
        command = ["python3", path.name]
    elif language == "bash":
        command = ["bash", "-euo", "pipefail", "-c", text]
    else:
        raise Failed(f"line {line}: a block of {language}")
    process = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT)
    output = "\n".join(process.stdout.rstrip().split("\n")[-LINES:])
    if fails:
        if not process.returncode:
            raise Failed(f"line {line}: passes now, but is marked as failing: {fails}: remove the mark")
        return f"line {line} fails as expected: {fails}"
    if process.returncode:
        raise Failed(f"line {line}: exit status {process.returncode}\n{output}")
    return ""


def main(page, folder, *flags):
    failed = 0
    for title, needs, blocks in sections(Path(page)):
        if not blocks:
            continue
        missing = [n for n in needs if ("--torch" not in flags if n == "torch" else not shutil.which(n))]
        if missing:
            print(f"skip\t{title}\tneeds {', '.join('--torch' if n == 'torch' else n for n in missing)}", flush=True)
            continue
        started, result, notes = time.monotonic(), "ok", []
        try:
            notes = [note for note in (run(Path(folder), *block) for block in blocks) if note]
        except (Failed, subprocess.TimeoutExpired) as error:
            failed, result, notes = failed + 1, "FAIL", [str(error)]
        print(result, title, f"{time.monotonic() - started:.0f} s", *notes, sep="\t", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
