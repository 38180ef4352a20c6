"""Exported models in onnxruntime, for servers and batch jobs. Knows nothing of Ray."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from PIL import Image, ImageOps
from tokenizers import Tokenizer

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_PIXELS = 16_000_000
# Pictures are resized by their shorter side, so a long strip would become a huge picture.
MAX_RATIO = 20


class Refused(ValueError):
    """A request that cannot be answered, with the HTTP status that says so."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(status, reason)
        self.status = status
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def load(folder: Path, library: str | None, threads: int) -> ort.InferenceSession:
    """The folder's model. With the library, onnxruntime skips heads that a token does not use; without it, all are computed."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    if library:
        options.register_custom_ops_library(library)
    found = [path for path in (folder / "model.onnx", folder / "onnx/model.onnx") if path.exists()]
    if not found:
        raise FileNotFoundError(f"{folder}: no model.onnx, and no onnx/model.onnx")
    return ort.InferenceSession(str(found[0]), options, providers=["CPUExecutionProvider"])


class TextModel:
    """An exported language model, which continues prompts greedily."""

    def __init__(self, folder: str, library: str | None = None, threads: int = 1) -> None:
        root = Path(folder)
        self.session = load(root, library, threads)
        self.tokenizer = Tokenizer.from_file(str(root / "tokenizer.json"))
        # As the file was saved in a training, it may cut and pad texts.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        config = read_json(root / "config.json")
        self.context: int = config["max_position_embeddings"]
        self.vocabulary: int = config["vocab_size"]
        end = read_json(root / "generation_config.json").get("eos_token_id", config.get("eos_token_id"))
        self.end: list[int] = end if isinstance(end, list) else [] if end is None else [end]
        # past_key_values.0.key, ...: (batch, heads, past, head size)
        types = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
        self.caches = {i.name: (i.shape, types[i.type]) for i in self.session.get_inputs() if i.name.startswith("past")}

    def encode(self, prompt: str | list[int], max_tokens: int) -> list[int]:
        """The prompt's tokens. Raises `Refused` where the model cannot continue them by `max_tokens`."""
        tokens = self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt
        if not tokens:
            raise Refused(422, "prompt: no tokens")
        wrong = next((token for token in tokens if not 0 <= token < self.vocabulary), None)
        if wrong is not None:
            raise Refused(422, f"prompt: token {wrong}, expected 0 to {self.vocabulary - 1}")
        if len(tokens) + max_tokens > self.context:
            reason = f"prompt of {len(tokens)} tokens and max_tokens of {max_tokens}: the model's context is {self.context} tokens"
            raise Refused(422, reason)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens))

    def generate(self, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> list[list[int]]:
        """Continues all prompts at once, each by at most `limits[i]` tokens, and up to its end token, which is left out."""
        batch, longest = len(prompts), max(map(len, prompts))
        ids = np.zeros((batch, longest), np.int64)
        mask = np.zeros((batch, longest), np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        positions = np.maximum(mask.cumsum(1) - 1, 0)
        past = {name: np.zeros((batch, shape[1], 0, shape[3]), dtype) for name, (shape, dtype) in self.caches.items()}
        found: list[list[int]] = [[] for _ in prompts]
        running = set(range(batch))
        while running:
            feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, **past}
            logits, *present = self.session.run(None, feeds)
            ids = logits[:, -1:].argmax(-1)
            for row in list(running):
                token = int(ids[row, 0])
                if token not in self.end:
                    found[row].append(token)
                if token in self.end or len(found[row]) >= limits[row]:
                    running.remove(row)
            mask = np.concatenate([mask, np.ones((batch, 1), np.int64)], 1)
            positions = positions[:, -1:] + 1
            past = dict(zip(past, present))
        return found


class ImageModel:
    """An exported image classifier, and the preparation that its preprocessor_config.json describes."""

    def __init__(self, folder: str, library: str | None = None, threads: int = 1) -> None:
        root = Path(folder)
        self.session = load(root, library, threads)
        self.settings = read_json(root / "preprocessor_config.json")
        if not self.settings:
            raise FileNotFoundError(f"{root / 'preprocessor_config.json'}: not there; it says how pictures are prepared")
        names = read_json(root / "config.json").get("id2label", {})
        port = self.session.get_inputs()[0]
        self.input: str = port.name
        self.type = np.float16 if port.type == "tensor(float16)" else np.float32
        self.shape: tuple[int, ...] = tuple(port.shape[1:])
        self.labels = [names.get(str(i), str(i)) for i in range(self.session.get_outputs()[0].shape[1])]

    def prepare(self, encoded: bytes) -> np.ndarray:
        """Pixels (channels, height, width) of a PNG, JPEG or WebP file. Raises `Refused` where it is none."""
        try:
            with Image.open(io.BytesIO(encoded), formats=FORMATS) as file:
                width, height = file.size
                if width * height > MAX_PIXELS:
                    raise Refused(413, f"picture: {width} x {height} pixels, more than {MAX_PIXELS}")
                if max(width, height) > MAX_RATIO * min(width, height):
                    raise Refused(422, f"picture: {width} x {height} pixels, one side more than {MAX_RATIO} times the other")
                if file.mode.startswith(("I", "F")):
                    raise Refused(422, f"picture: pixels of type {file.mode}, expected 8 bits a sample")
                picture = ImageOps.exif_transpose(file)
        except Refused:
            raise
        except Image.DecompressionBombError as error:
            raise Refused(413, f"picture: {error}") from None
        except Image.UnidentifiedImageError:
            raise Refused(400, f"picture: none of {', '.join(FORMATS)}") from None
        except (OSError, SyntaxError, ValueError) as error:
            raise Refused(400, f"picture: {error}") from None
        if picture.has_transparency_data:
            white = Image.new("RGBA", picture.size, "white")
            picture = Image.alpha_composite(white, picture.convert("RGBA"))
        return self.normalize(self.resize(picture.convert("RGB")))

    def resize(self, picture: Image.Image) -> Image.Image:
        size, resample = self.settings["size"], Image.Resampling(self.settings.get("resample", 2))
        if "shortest_edge" not in size:
            return picture.resize((size["width"], size["height"]), resample)
        short, least = size["shortest_edge"], min(picture.size)
        picture = picture.resize((picture.width * short // least, picture.height * short // least), resample)
        if not self.settings.get("do_center_crop"):
            return picture
        width, height = (self.settings["crop_size"][side] for side in ("width", "height"))
        left, top = (picture.width - width) // 2, (picture.height - height) // 2
        return picture.crop((left, top, left + width, top + height))

    def normalize(self, picture: Image.Image) -> np.ndarray:
        pixels = np.asarray(picture, np.float32) / 255
        if self.settings.get("do_normalize", True):
            pixels = (pixels - np.float32(self.settings["image_mean"])) / np.float32(self.settings["image_std"])
        return pixels.transpose(2, 0, 1).astype(self.type)

    def blank(self) -> np.ndarray:
        return np.zeros(self.shape, self.type)

    def probabilities(self, pictures: Sequence[np.ndarray]) -> np.ndarray:
        """The classes' probabilities, (pictures, classes)."""
        (logits,) = self.session.run(None, {self.input: np.stack(pictures)})
        odds = np.exp(logits.astype(np.float32) - logits.max(1, keepdims=True))
        return odds / odds.sum(1, keepdims=True)
