"""The commands `moh-export` and `moh-run`: this process becomes the program."""

import os
import sys
from typing import NoReturn

from ._files import compiled


def _become(name: str) -> NoReturn:
    program = compiled(name)
    os.execv(program, [name, *sys.argv[1:]])


def moh_export() -> NoReturn:
    """Runs `moh-export` with the arguments of this process."""
    _become("moh-export")


def moh_run() -> NoReturn:
    """Runs `moh-run` with the arguments of this process."""
    _become("moh-run")
