"""An error that comes out of the user's own file, as one line."""

from __future__ import annotations

import os
from pathlib import Path
from types import FrameType

from gradstow.cli._input import InputError

_FOLDERS: set[str] = set()


def remember(file: Path) -> None:
    """Code in the folder of this file is the user's."""
    _FOLDERS.add(os.path.realpath(file.parent) + os.sep)


def blame(error: BaseException) -> InputError | None:
    """The line of the user's code in which ``error`` was raised, by itself or by PyTorch; None where it was not."""
    place = None
    trace = error.__traceback__
    while trace is not None:
        if _library(trace.tb_frame) != "torch":  # an op that refuses its arguments was called wrongly
            place = trace
        trace = trace.tb_next
    if place is None or not _own(place.tb_frame):
        return None
    file = os.path.basename(place.tb_frame.f_code.co_filename)
    return InputError(f"the step failed in {file}, line {place.tb_lineno}: {type(error).__name__}: {error}")


def _library(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _own(frame: FrameType) -> bool:
    file = os.path.realpath(frame.f_code.co_filename)
    installed = "site-packages" in file or _library(frame) == "gradstow"
    return not installed and file.startswith(tuple(_FOLDERS))
