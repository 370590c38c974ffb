"""Where values can go: ``"host"``, ``"disk"``, the folder for temporary files, or ``"disk:/path"``."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from gradstow._codes import PLACES
from gradstow._errors import OffloadError, PolicyError


def parse_place(text: object) -> str:
    """The place in its canonical form, with an absolute path.

    Raises:
        PolicyError: no such place.
    """
    kind, colon, folder = text.partition(":") if isinstance(text, str) else ("", "", "")
    if kind not in PLACES or (colon and (kind != "disk" or not folder)):
        raise PolicyError(
            f'offload={text!r} is no place. Give "host" (memory of the machine, for values of an accelerator), "disk" '
            '(the folder for temporary files) or "disk:/path/to/folder".'
        )
    return f"disk:{Path(folder).expanduser().absolute()}" if colon else kind


def folder_of(place: str) -> Path:
    """The folder of a place on disk."""
    folder = place.partition(":")[2]
    return Path(folder) if folder else Path(tempfile.gettempdir())


def check_place(place: str, device: str) -> None:
    """Refuse a place that cannot take anything, before anything is planned.

    Raises:
        OffloadError: it is no folder, cannot be written to, or is where the model's values are anyway.
    """
    if device not in ("cpu", "cuda"):
        raise OffloadError(
            f"offload={place!r}: the model is on {device}, and only values on a CPU or a CUDA device can be offloaded. "
            "Leave offload= away."
        )
    if place == "host":
        if device == "cpu":
            raise OffloadError(
                'offload="host": the model is on the CPU, and its values are in host memory anyway. Give "disk", or '
                'plan for a device elsewhere: gs.plan(..., device="cuda:h100").'
            )
        return
    folder = folder_of(place)
    if not folder.is_dir():
        raise OffloadError(f"offload={place!r}: {folder} is no folder. Make it, or name another: offload='disk:/path'.")
    try:
        os.close(open_unnamed(folder))
    except OSError as error:
        raise OffloadError(
            f"offload={place!r}: no file can be made in {folder} ({error.strerror}). Name a folder that can be "
            "written to: offload='disk:/path'."
        ) from error


def open_unnamed(folder: Path) -> int:
    """A file without a name, which the system removes when this process ends, however it ends."""
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
    handle, name = tempfile.mkstemp(prefix="gradstow-", dir=folder)
    os.unlink(name)
    return handle


_NO_TMPFILE = {getattr(__import__("errno"), name) for name in ("EOPNOTSUPP", "EISDIR", "EINVAL", "ENOENT")}
