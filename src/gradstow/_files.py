"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from gradstow._errors import GradstowError


def write_text(path: str | os.PathLike[str], text: str, what: str) -> Path:
    """Write ``text``; where that fails, what was there before still is.

    Args:
        what: names it in errors, such as "the plan".

    Raises:
        GradstowError: the file cannot be written.
    """
    target = Path(os.path.realpath(path))  # a link stays a link
    if target.exists() and not target.is_file():
        raise GradstowError(f"{what} cannot be written to {path}: it is not a file. Choose another place.")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, target)
    except OSError as error:
        why = error.strerror or str(error)
        raise GradstowError(f"{what} cannot be written to {path}: {why}. Choose another place.") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return Path(path)
