"""The error for what a user typed."""

from __future__ import annotations

import os
from pathlib import Path

from gradstow._errors import GradstowError


class InputError(GradstowError, ValueError):
    """An argument that means nothing here: exit code 2."""


def check_writable(path: Path | None, what: str) -> None:
    """Before anything takes time: whether ``what``, such as "the plan", can be written there.

    Raises:
        InputError: it cannot.
    """
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        why = "its folder does not exist"
    elif path.is_dir():
        why = "it is a folder"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        why = "there is no permission to write there"
    else:
        return
    raise InputError(f"{what} cannot be written to {path}: {why}. Name another file.")
