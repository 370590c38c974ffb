"""A CSV file that rows reach as they are measured, each in the place of the same row of an earlier run."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradstow._errors import GradstowError
from gradstow._files import write_text
from gradstow.cli._input import InputError, check_writable
from gradstow.cli._versions import VERSIONS

SAME_PLACE = tuple(name for name in VERSIONS if name != "date")


def check_csv(path: Path | None, naming: Iterable[str], target: str | None = None) -> None:
    """Before anything takes time: whether rows can be written there, beside rows that are there already.

    Args:
        naming: columns that the file must have, apart from those of versions, where it exists.
        target: the command's; its own file is not written over.

    Raises:
        InputError: they cannot; or the file holds something else, which is not overwritten.
    """
    check_writable(path, "the rows", target)
    if path is None or not path.exists():
        return
    try:
        header = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))).fieldnames
    except (ValueError, csv.Error):  # no text at all
        header = [""]
    if header and not {*naming, *VERSIONS} <= set(header):
        raise InputError(f"{path} holds something else than rows of this table. Name another file.")


def put_rows(path: Path, names: Sequence[str], same: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write ``rows`` behind those of the file that are others; the file is whole at any moment.

    Args:
        names: columns, in order; others that the file has stay behind them.
        same: the columns by which a row of the file and a new one are of the same thing, so that the new one stays.

    Raises:
        GradstowError: the file cannot be written.
    """
    new = [{name: _text(row.get(name)) for name in names} for row in rows]
    replaced = {_of(row, same) for row in new}
    kept = [row for row in _read(path) if _of(row, same) not in replaced]
    columns = dict.fromkeys([*names, *(name for row in kept for name in row)])
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows([*kept, *new])
    write_text(path, text.getvalue(), "the rows")


def _read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [{name: text or "" for name, text in row.items() if name} for row in csv.DictReader(file)]
    except (OSError, ValueError, csv.Error) as error:  # it is another one since the command began
        raise GradstowError(f"the rows cannot be written to {path}: what is there cannot be read: {error}.") from error


def _of(row: Mapping[str, str], same: Sequence[str]) -> tuple[str, ...]:
    return tuple(row.get(name, "") for name in same)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else str(value)
