"""`export`: the program `moh-export`, called from Python."""

from __future__ import annotations

import json
import os
import subprocess
import warnings
from typing import Any, Dict, Optional, Sequence, Tuple, Union

from ._files import compiled, get_library_path

Path = Union[str, "os.PathLike[str]"]
Option = Union[None, bool, int, float, Path, Sequence[Union[str, "os.PathLike[str]"]]]


class ExportError(RuntimeError):
    """`moh-export` failed; the text is its message, `returncode` its exit status, negative for a signal."""

    def __init__(self, message: str, returncode: int) -> None:
        super().__init__(message)
        self.returncode = returncode

    def __reduce__(self) -> Tuple[Any, ...]:
        # From another process, as that of a pool, it arrives by both arguments.
        return type(self), (str(self), self.returncode)


def _arguments(options: Dict[str, Option]) -> "list[str]":
    """Options of `moh-export`: `dtype="f16"` is `--dtype f16`, `force=True` is `--force`."""
    arguments = []
    for name, value in options.items():
        # `for` is a word of Python's.
        flag = "--" + name.rstrip("_").replace("_", "-")
        if flag in ("--json", "--quiet", "--output"):
            raise TypeError(f"export() takes no option {name!r}: the report is what it returns, and the output its second argument")
        if flag in ("--help", "--version"):
            raise TypeError(f"export() takes no option {name!r}, which exports nothing")
        if flag == "--with-library" and value is True:
            value = get_library_path()
        if flag == "--verify" and value is False:
            flag, value = "--no-verify", True
        if value is None or value is False:
            continue
        if value is True:
            arguments.append(flag)
        elif isinstance(value, (str, int, float, os.PathLike)):
            arguments.append(f"{flag}={os.fspath(value) if isinstance(value, os.PathLike) else value}")
        else:
            arguments += [f"{flag}={os.fspath(one)}" for one in value]
    return arguments


def export(checkpoint: Path, output: Optional[Path] = None, **options: Option) -> Dict[str, Any]:
    """Exports a checkpoint to ONNX, compares the result with a reference implementation, and returns the report.

    checkpoint: a .safetensors, .pth, .pt, .bin, .ckpt or .pkl file with config.json beside it, an .index.json, or a folder with one.
    output: the model to write, such as `out/model.onnx`; its folder is made. None with `triton=`, which names a folder.
    options: those of `moh-export`, with `_` for `-`: `dtype="f16"`, `force=True`, `quantize="int8"`; `for_="ort-cpu"` is `--for`.
        A list repeats an option. True is an option without a value, False and None leave it out, but for
        `verify=False`, which is `--no-verify`. `with_library=True` copies this
        package's library beside the model. `moh-export --help` lists the options.

    The report has what `moh-export --json` prints: files, sizes, digests, and the differences that the comparison found.

    Warnings of `moh-export` become `UserWarning`s. Raises `ExportError` with the program's message where it fails; nothing is written then.
    """
    command = [compiled("moh-export"), "--json", *_arguments(options)]
    if output is not None:
        command.append(f"--output={os.fspath(output)}")
    command += ["--", os.fspath(checkpoint)]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="replace"
    ) as process:
        try:
            stdout, stderr = process.communicate()
        except BaseException:
            # Asked to end it removes its temporary files; killed it could not.
            process.terminate()
            raise
    if process.returncode:
        message = stderr.strip() or f"moh-export ended with {process.returncode} and said nothing"
        message = message[len("error: "):] if message.startswith("error: ") else message
        raise ExportError(message, process.returncode)
    for line in stderr.splitlines():
        if line.startswith("warning: "):
            warnings.warn(line[len("warning: "):], stacklevel=2)
    report: Dict[str, Any] = json.loads(stdout)
    return report
