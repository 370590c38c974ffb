"""Columns of the tables, and how their values are shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gradstow._units import format_bytes, format_seconds


@dataclass(frozen=True)
class Column:
    """One column: its key in the rows, its title in the text, and how a value is shown there.

    Without a title it is in JSON and CSV only. ``parts`` are added to the key where a value has several in a CSV.
    With the settings, the columns that are ``naming`` say what a row is of.
    """

    key: str
    title: str = ""
    show: Callable[[Any], str] = str
    parts: tuple[str, ...] = ("",)
    naming: bool = False

    @property
    def in_csv(self) -> list[str]:
        return [self.key + part for part in self.parts]


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
WAY = Column("way", "way", naming=True)
STRATEGY = Column("strategy", "strategy", naming=True)
CONTEST = (STEP_PEAK, SAVED, SECONDS, RATIO, INTERVAL, LOSS, EQUAL_TO, EQUAL)  # what a contest's rows have
