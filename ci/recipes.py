"""Runs the code blocks of pages, in order. ci/recipes.sh prepares what they need.

usage: recipes.py FOLDER PAGE... [--torch]

A recipe is a section (`## Title`). Its ```bash blocks are run. So are its ```python blocks, except those that begin
with `# NAME.py`: they are saved under that name. Each block is a process of its own in FOLDER. Comments of the page
change this:

    <!-- recipes: needs COMMAND -->   the section is left out where there is no such command; torch: without --torch
    <!-- recipes: fails REASON -->    the next block is expected to fail; if it does not, the comment has to go
    <!-- recipes: skip REASON -->     the next block is not run
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
    title, needs, blocks, fails, skip = f"{page.name}, before its first section", [], [], None, False
    lines = page.read_text().split("\n")
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if line.startswith("## "):
            yield title, needs, blocks
            title, needs, blocks, fails, skip = line[3:], [], [], None, False
        elif comment := re.fullmatch(r"<!-- recipes: (\w+) (.+) -->", line):
            if comment[1] == "needs":
                needs.append(comment[2])
            elif comment[1] == "fails":
                fails = comment[2]
            elif comment[1] == "skip":
                skip = True
            else:
                raise SystemExit(f"{page}:{at}: unknown comment: {line}")
        elif fence := re.fullmatch(r"```(\w+)", line):
            end = lines.index("```", at)
            if not skip:
                blocks.append((at, fence[1], "\n".join(lines[at:end]) + "\n", fails))
            at, fails, skip = end + 1, None, False
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


def run_page(page, folder, torch):
    """Runs one page. Returns how many of its sections failed."""
    failed = 0
    for title, needs, blocks in sections(page):
        if not blocks:
            continue
        missing = [n for n in needs if (not torch if n == "torch" else not shutil.which(n))]
        if missing:
            print(f"skip\t{title}\tneeds {', '.join('--torch' if n == 'torch' else n for n in missing)}", flush=True)
            continue
        started, result, notes = time.monotonic(), "ok", []
        try:
            notes = [note for note in (run(folder, *block) for block in blocks) if note]
        except (Failed, subprocess.TimeoutExpired) as error:
            failed, result, notes = failed + 1, "FAIL", [str(error)]
        print(result, title, f"{time.monotonic() - started:.0f} s", *notes, sep="\t", flush=True)
    return failed


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--torch"]
    if len(arguments) < 2:
        sys.exit(__doc__)
    failures = sum(run_page(Path(page), Path(arguments[0]), "--torch" in sys.argv) for page in arguments[1:])
    sys.exit(1 if failures else 0)
