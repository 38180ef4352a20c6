"""Draws the pictures of docs/run.md with the commands of that page, and compares them with the files in docs.

usage: pictures.py FOLDER DOCS

A PNG file may differ by 2 of 255 in some pixels: instruction sets round differently. An SVG file must be the same text.
"""

import re
import subprocess
import sys
from pathlib import Path

from PIL import Image, ImageChops

TOLERANCE = 2


def difference(drawn, shown):
    """What is different, or nothing."""
    if shown.suffix != ".png":
        return "" if drawn.read_text() == shown.read_text() else "the texts differ"
    pictures = [Image.open(path).convert("RGB") for path in (drawn, shown)]
    if pictures[0].size != pictures[1].size:
        return f"{pictures[0].size} pixels in place of {pictures[1].size}"
    most = max(high for _, high in ImageChops.difference(*pictures).getextrema())
    return f"pixels differ by up to {most} of 255" if most > TOLERANCE else ""


def main(folder, docs):
    # Commands that export or draw, in the page's order: a picture needs the model that an earlier command exported.
    page = (docs / "run.md").read_text()
    commands = re.findall(r"^ {4}(moh-(?:export|run) .* -o \S+)$", page, re.MULTILINE)
    seen = failed = 0
    for command in commands:
        name = command.rsplit(" ", 1)[1]
        process = subprocess.run(["bash", "-c", command + (" --force" if name.endswith(".onnx") else "")], cwd=folder,
                                 stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        problem = f"exit status {process.returncode}: {process.stdout}" if process.returncode else ""
        if not problem and (docs / name).exists():
            seen += 1
            problem = difference(folder / name, docs / name)
        failed += bool(problem)
        print("FAIL" if problem else "ok", command, problem, sep="\t", flush=True)
    if seen < 2:
        failed += 1
        print(f"FAIL\tdocs/run.md\tdraws {seen} of the pictures in docs")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
