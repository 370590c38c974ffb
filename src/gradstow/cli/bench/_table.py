"""A table of results: its rows are data, and this file makes text, JSON and CSV of them."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from gradstow._errors import BudgetTooSmall
from gradstow._units import format_bytes, format_seconds
from gradstow.cli._input import InputError
from gradstow.cli._output import Emit
from gradstow.cli._versions import VERSIONS, versions

Csv = Annotated[Path | None, typer.Option("--csv", help="Also write the rows to this file, with versions and date.")]
Rounds = Annotated[int, typer.Option("--rounds", help="Timed rounds, interleaved with plain PyTorch.")]
Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """One column: its key in the rows, its title in the text, and how a value is shown there.

    Without a title it is in JSON and CSV only. ``parts`` are added to the key where a value has several in a CSV.
    """

    key: str
    title: str = ""
    show: Callable[[Any], str] = str
    parts: tuple[str, ...] = ("",)

    @property
    def in_csv(self) -> list[str]:
        return [self.key + part for part in self.parts]


@dataclass
class Table:
    """Rows of one command.

    Attributes:
        command: such as "alexnet".
        about: one line on what was measured.
        settings: what was asked for, as data.
        notes: lines below the rows.

    A row with "refused" has that text in the place of its numbers.
    """

    command: str
    about: str
    columns: Sequence[Column]
    settings: Mapping[str, Any]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def publish(self, emit: Emit, out: Path | None) -> None:
        """Print, then write the CSV: what took minutes is seen even where the disk is full."""
        where = versions()
        data = {"table": self.command, **self.settings, "rows": self.rows, "notes": self.notes, "versions": where}
        written = "" if out is None else f"\nThe rows are in {out}."
        emit(self.text(where) + written, data)
        if out is not None:
            self.write(out, where)

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

    def write(self, path: Path, where: Mapping[str, Any]) -> None:
        keys = [key for column in self.columns for key in column.in_csv]
        if any("refused" in row for row in self.rows):
            keys.append("refused")
        settings = [name for name in self.settings if name not in keys]
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*settings, *keys, *VERSIONS], extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            for row in self.rows:
                whole = {**self.settings, **row, **where}
                for column in self.columns:
                    if len(column.in_csv) > 1 and column.key in row:
                        whole |= zip(column.in_csv, row[column.key], strict=True)
                writer.writerow({key: f"{v:.6g}" if isinstance(v, float) else v for key, v in whole.items()})


def _cell(column: Column, row: Mapping[str, Any]) -> str:
    value = row.get(column.key)
    return "" if value is None else column.show(value)


def check_counts(**counts: int) -> None:
    """Options that must be at least 1; ``steps=`` at least 2, because the first step of a plan is not like the others.

    Raises:
        InputError: one of them is less.
    """
    for name, value in counts.items():
        least = 2 if name == "steps" else 1
        if value < least:
            raise InputError(f"--{name} {value} measures nothing. Give at least {least}.")


def data_name(text: str) -> str:
    """A set's name, or a folder's without the way there, which is of one machine only."""
    return Path(text).resolve().name


def refusal(error: BudgetTooSmall) -> str:
    """Why a row has no numbers, short enough for a table."""
    text = str(error)
    return (text.partition(": ")[2] or text).partition(", set by")[0]


def ratio(value: float) -> str:
    return f"{value:.3f}"


def share(value: float) -> str:
    return f"{100 * value:.1f} %"


def loss(value: float) -> str:
    return f"{value:.6f}"


def yes(value: bool) -> str:
    return "yes" if value else "NO"


def interval(value: Sequence[float]) -> str:
    return f"{value[0]:.2f} to {value[1]:.2f}"


STEP_PEAK = Column("step_peak_bytes", "step peak", format_bytes)
SAVED = Column("saved_bytes", "saved", format_bytes)
SECONDS = Column("seconds", "step", format_seconds)
RATIO = Column("time_ratio", "time", ratio)
INTERVAL = Column("time_ratio_interval", "95 %", interval, parts=("_low", "_high"))
LOSS = Column("loss", "loss", loss)
EQUAL_TO = Column("equal_to", "loss equal to")
EQUAL = Column("equal")
ACCURACY = Column("accuracy", "accuracy", share)
