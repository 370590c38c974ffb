"""Options that several tables share, and their checks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from gradstow.cli._input import InputError
from gradstow.cli.bench._columns import Column
from gradstow.cli.bench._csv import check_csv

Csv = Annotated[Path | None, typer.Option("--csv", help="Also write the rows to this file, with versions and date.")]
Data = Annotated[
    str | None, typer.Option("--data", help="mnist, fashion, the folder of CIFAR-10, or of images by class.")
]
Rounds = Annotated[int, typer.Option("--rounds", help="Timed rounds, interleaved with plain PyTorch.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the weights and the order of the data.")]
Steps = Annotated[int, typer.Option("--steps", help="Steps that each way is trained.")]


def check_counts(**counts: int) -> None:
    """Options that must be at least 1; ``steps=`` at least 2, because the first step of a plan is not like the others.

    Raises:
        InputError: one of them is less.
    """
    for name, value in counts.items():
        least = 2 if name == "steps" else 1
        if value < least:
            raise InputError(f"--{name} {value} measures nothing. Give at least {least}.")


def check_file(out: Path | None, columns: Sequence[Column], target: str | None = None) -> None:
    """Of ``--csv``; it is not the file of ``target``.

    Raises:
        InputError: rows with these columns cannot be written there.
    """
    check_csv(out, [column.key for column in columns if column.naming], target)
