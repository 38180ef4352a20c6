"""Runs the commands of a page in docs, and compares the pictures that they draw with those in docs.

usage: commands.py FOLDER PAGE

A command is an indented line that begins with moh-export or moh-run. A PNG file may differ by 2 of 255 in some pixels:
instruction sets round differently. An SVG file must be the same text.
"""

import re
import subprocess
import sys
from pathlib import Path

from PIL import Image, ImageChops

TOLERANCE = 2
PICTURES = 2  # in docs


def difference(drawn, shown):
    """What is different, or nothing."""
    if shown.suffix != ".png":
        return "" if drawn.read_text() == shown.read_text() else "the texts differ"
    pictures = [Image.open(path).convert("RGB") for path in (drawn, shown)]
    if pictures[0].size != pictures[1].size:
        return f"{pictures[0].size} pixels, not {pictures[1].size}"
    most = max(high for _, high in ImageChops.difference(*pictures).getextrema())
    return f"pixels differ by up to {most} of 255" if most > TOLERANCE else ""


def main(folder, page):
    compared = failed = 0
    for command in re.findall(r"^ {4}(moh-(?:export|run) .+)$", page.read_text(), re.MULTILINE):
        if "inputs.safetensors" in command:  # the user's own
            continue
        force = " --force" if command.startswith("moh-export") and "random" not in command else ""
        process = subprocess.run(["bash", "-c", command + force], cwd=folder, stdin=subprocess.DEVNULL,
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        problem = f"exit status {process.returncode}: {process.stdout}" if process.returncode else ""
        output = command.rsplit(" -o ", 1)[-1]
        if not problem and (page.parent / output).is_file():
            compared += 1
            problem = difference(folder / output, page.parent / output)
        failed += bool(problem)
        print("FAIL" if problem else "ok", command, problem, sep="\t", flush=True)
    if compared < PICTURES:
        failed += 1
        print(f"FAIL\t{page.name}\tcompared {compared} pictures, expected {PICTURES}")
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
