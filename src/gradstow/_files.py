"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from gradstow._errors import GradstowError


def write_text(path: str | os.PathLike[str], text: str, what: str) -> Path:
    """``write_bytes`` for text.

    Raises:
        GradstowError: the file cannot be written.
    """
    return write_bytes(path, text.encode(), what)


def write_bytes(path: str | os.PathLike[str], data: bytes, what: str) -> Path:
    """Write ``data``; see ``whole``.

    Raises:
        GradstowError: the file cannot be written.
    """
    with whole(path, what) as file:
        file.write_bytes(data)
    return Path(path)


@contextlib.contextmanager
def whole(path: str | os.PathLike[str], what: str) -> Iterator[Path]:
    """Yields the file to write in its place; where that fails, what was there before still is.

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
        yield temporary
        os.replace(temporary, target)
    except OSError as error:
        why = error.strerror or str(error)
        raise GradstowError(f"{what} cannot be written to {path}: {why}. Choose another place.") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
