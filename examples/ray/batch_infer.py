"""Classifies pictures with Ray Data and an exported image classifier.

    python batch_infer.py vit pictures -o results

PICTURES is a folder, or a .safetensors file with `digits` and `labels` such as examples/checkpoints/digits-moh-vit/heldout.safetensors.
In a folder, pictures in sub-folders named like classes are labelled: pictures/three/1.png. Results are JSON files, one line a picture.
A file that is no picture gets the field `error`; then the program exits with 1, after all others are written.
"""

import argparse
import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from PIL import Image

from models import ImageModel, Refused

SCHEMA = pa.schema(
    [("path", pa.string()), ("label", pa.string()), ("probability", pa.float32()), ("right", pa.bool_()), ("error", pa.string())]
)


class Classifier:
    """A worker of `map_batches`: loads the model once, then turns batches of files into batches of results."""

    def __init__(self, model: str, library: str | None, threads: int) -> None:
        self.model = ImageModel(model, library, threads)

    def __call__(self, batch: dict[str, np.ndarray]) -> pa.Table:
        rows: list[dict[str, Any]] = []
        pixels = []
        for path, encoded in zip(batch["path"], batch["bytes"]):
            rows.append({"path": path})
            try:
                pixels.append(self.model.prepare(encoded))
            except Refused as error:
                rows[-1]["error"] = str(error)
        readable = [row for row in rows if "error" not in row]
        odds = self.model.probabilities(pixels) if pixels else []
        for row, one in zip(readable, odds):
            best = int(one.argmax())
            row.update(label=self.model.labels[best], probability=float(one[best]))
            folder = Path(row["path"]).parent.name
            if folder in self.model.labels:
                row["right"] = row["label"] == folder
        return pa.Table.from_pylist(rows, SCHEMA)


def held_out(file: str, labels: list[str]) -> ray.data.Dataset:
    """The digits of 8 x 8 pixels from 0 to 16 as PNG files of 64 x 64, named as in a folder of labelled pictures."""
    from safetensors.numpy import load_file

    tensors = load_file(file)
    rows = []
    for i, (digit, label) in enumerate(zip(tensors["digits"], tensors["labels"])):
        encoded = io.BytesIO()
        small = Image.fromarray(np.round(digit * (255 / 16)).astype(np.uint8))
        small.resize((64, 64), Image.Resampling.BILINEAR).save(encoded, "PNG")
        rows.append({"path": f"{labels[int(label)]}/{i}.png", "bytes": encoded.getvalue()})
    return ray.data.from_items(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of an exported image classifier")
    parser.add_argument("pictures", help="folder, or .safetensors file with digits")
    parser.add_argument("-o", "--output", required=True, help="folder for the results; it must not exist")
    parser.add_argument("--library", help="libmoh_ops.so, which skips unused heads")
    parser.add_argument("--workers", type=int, default=2, help="processes with a model each, at most (2)")
    parser.add_argument("--threads", type=int, default=1, help="threads of a worker (1)")
    parser.add_argument("--batch", type=int, default=64, help="pictures of a batch (64)")
    arguments = parser.parse_args()
    if Path(arguments.output).exists():
        parser.error(f"{arguments.output}: is there already")
    for given in (arguments.model, arguments.pictures, arguments.library):
        if given and "://" not in given and not Path(given).exists():
            parser.error(f"{given}: is not there")
    # Workers have a folder of their own.
    model = str(Path(arguments.model).resolve())
    library = arguments.library and str(Path(arguments.library).resolve())

    if arguments.pictures.endswith(".safetensors"):
        files = held_out(arguments.pictures, ImageModel(model).labels)
    else:
        # Reading needs no CPU of its own: workers may have reserved all of them.
        files = ray.data.read_binary_files(arguments.pictures, include_paths=True, ray_remote_args={"num_cpus": 0})
    results = files.map_batches(
        Classifier,
        fn_constructor_args=(model, library, arguments.threads),
        batch_size=arguments.batch,
        num_cpus=arguments.threads,
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=arguments.workers),
    ).materialize()
    results.write_json(str(Path(arguments.output).resolve()))

    bad = results.filter(lambda row: row["error"] is not None).take_all()
    for row in bad:
        print(f"{row['path']}: {row['error']}", file=sys.stderr)
    print(f"{results.count()} files, {len(bad)} of them no pictures: {arguments.output}")
    accuracy = results.mean("right")
    if accuracy is not None:
        print(f"accuracy on labelled pictures: {accuracy:.4f}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
