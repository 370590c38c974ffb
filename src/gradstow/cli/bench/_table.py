"""A table of results: its rows are data, and this file makes text, JSON and CSV of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradstow.cli._output import Emit, Files, Meter
from gradstow.cli._versions import VERSIONS, versions
from gradstow.cli.bench._columns import Column
from gradstow.cli.bench._csv import SAME_PLACE, put_rows
from gradstow.cli.bench._refused import REFUSED, Row


@dataclass
class Table:
    """Rows of one command.

    Attributes:
        command: such as "alexnet".
        about: one line on what was measured.
        settings: what was asked for, as data.
        out: the CSV file.
        found: what was measured once for all rows.
        notes: lines below the rows.

    A row with "refused" has that text in the place of its numbers.
    """

    command: str
    about: str
    columns: Sequence[Column]
    settings: Mapping[str, Any]
    out: Path | None = None
    found: Mapping[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def measure(self, rows: Callable[[Meter], Iterable[Row]], emit: Emit) -> None:
        """Take the rows as ``rows(meter)`` measures them; each is in the file at once, and all are printed at the end.

        Raises:
            GradstowError: the file cannot be written any more; what took minutes has been printed nevertheless.
        """
        where = versions()
        with Meter() as meter:
            for row in rows(meter):
                self.rows.append(row)
                self._write(where)  # a failure, such as a full disk, is told at the end
        data = {"table": self.command, **self.settings, **self.found, "rows": self.rows, "notes": self.notes}
        files = self._write(where)
        emit(self.text(where) + files.text, {**data, "versions": where})
        files.check()

    def text(self, where: Mapping[str, Any]) -> str:
        shown = [column for column in self.columns if column.title]
        first = shown[0]
        lines = [[column.title for column in shown]]
        lines += [[_cell(column, row) for column in shown] for row in self.rows]
        widths = [max(len(line[n]) for line in lines) for n in range(len(shown))]
        rows: list[str] = []
        for line, row in zip(lines, [{}, *self.rows], strict=True):
            if "refused" in row:
                rows.append(f"{_cell(first, row):<{widths[0]}}  refused: {row['refused']}")
                continue
            rest = (f"{text:>{width}}" for text, width in zip(line[1:], widths[1:], strict=True))
            rows.append("  ".join([f"{line[0]:<{widths[0]}}", *rest]).rstrip())
        measured = ", ".join(f"{where[name]}" for name in ("machine", "date"))
        used = f"torch {where['torch']}, gradstow {where['gradstow']}, Python {where['python']}"
        return "\n".join([self.about, *rows, *self.notes, f"{used}; {measured}, threads: {where['threads']}"])

    def _write(self, where: Mapping[str, Any]) -> Files:
        files = Files()
        files.write("rows", self.out, lambda path: self._put(path, where))
        return files

    def _put(self, path: Path, where: Mapping[str, Any]) -> None:
        whole = [{**self.settings, **self.found, **_parts(self.columns, row), **where} for row in self.rows]
        keys = [key for column in self.columns for key in column.in_csv]
        keys += [key for key in REFUSED if any(key in row for row in self.rows)]
        names = dict.fromkeys([*self.settings, *self.found, *keys, *VERSIONS])
        same = [*self.settings, *(column.key for column in self.columns if column.naming), *SAME_PLACE]
        put_rows(path, list(names), same, whole)


def _parts(columns: Sequence[Column], row: Row) -> Row:
    """The row with a value that has several parts in a column for each."""
    apart = [zip(c.in_csv, row[c.key], strict=True) for c in columns if len(c.in_csv) > 1 and c.key in row]
    return row | {name: value for parts in apart for name, value in parts}


def _cell(column: Column, row: Mapping[str, Any]) -> str:
    value = row.get(column.key)
    return "" if value is None else column.show(value)


def data_name(text: str) -> str:
    """A set's name, or a folder's without the way there, which is of one machine only."""
    return Path(text).resolve().name
