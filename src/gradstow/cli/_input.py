"""What a user typed, and what can be said against it before anything takes time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from gradstow._errors import GradstowError

_PICTURES = (".png", ".svg", ".pdf")


class InputError(GradstowError, ValueError):
    """An argument that means nothing here: exit code 2."""


def check_writable(path: Path | None, what: str, target: str | None = None) -> None:
    """Before anything takes time: whether ``what``, such as "the plan", can be written there.

    ``target``: the command's; its own file is not written over.

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
    elif path.exists() and not path.is_file():
        why = "it is not a file"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        why = "there is no permission to write there"
    elif target is not None and _same(path, Path(target.rpartition(":")[0])):
        why = f"that is the file of {target}"
    else:
        return
    raise InputError(f"{what} cannot be written to {path}: {why}. Name another file.")


def check_outputs(outputs: Mapping[str, Path | None], target: str | None = None) -> None:
    """``check_writable`` for several, by what they are; no two of them are one file.

    Raises:
        InputError: one of them cannot be written.
    """
    seen: dict[str, str] = {}
    for what, path in outputs.items():
        check_writable(path, what, target)
        if path is None:
            continue
        other = seen.setdefault(os.path.realpath(path), what)
        if other != what:
            raise InputError(f"{other} and {what} cannot both be written to {path}. Name another file for one of them.")


def check_picture(path: Path | None) -> None:
    """Before anything takes time: whether a picture can be drawn, and to such a file.

    Raises:
        InputError: it cannot.
    """
    if path is None:
        return
    if path.suffix.lower() not in _PICTURES:
        raise InputError(f"{path} is no kind of picture that can be drawn. End its name with {', '.join(_PICTURES)}.")
    if find_spec("matplotlib") is None:
        raise InputError("a picture needs matplotlib, which is not installed. Run: pip install 'gradstow[report]'")


def _same(path: Path, other: Path) -> bool:
    return os.path.realpath(path) == os.path.realpath(other)
