#!/usr/bin/env python3
"""Runs the Python programs of an exported folder's README.md, in that folder.

usage: run_card.py FOLDER [HEADING]...

Without headings all of them, else those below the headings.
"""

import re
import subprocess
import sys
from pathlib import Path

from common import report


def main():
    folder, headings = sys.argv[1], sys.argv[2:]
    sections = re.split(r"^## ", (Path(folder) / "README.md").read_text(), flags=re.M)[1:]
    for section in sections:
        heading = section.splitlines()[0]
        if headings and heading not in headings:
            continue
        for code in re.findall(r"^```python\n(.*?)^```$", section, flags=re.M | re.S):
            done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
            said = (done.stdout + done.stderr).strip().splitlines() or [""]
            report(f"README.md {folder} {heading}", done.returncode == 0, said[-1][:90])


if __name__ == "__main__":
    main()
