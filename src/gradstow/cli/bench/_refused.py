"""Rows whose budget is refused: each is followed by one with the smallest budget that can be met."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, Self, TypeVar

from gradstow._errors import BudgetTooSmall
from gradstow._units import format_bytes

Row = dict[str, Any]
REFUSED = ("refused", "smallest_budget_bytes")  # what a refused row has in the place of its numbers


class Asked(Protocol):
    """What a row is measured for.

    Attributes:
        at_least: the same with the smallest budget in bytes, where this one's budget is refused.
    """

    @property
    def name(self) -> str: ...

    @property
    def at_least(self) -> Callable[[int], Self] | None: ...


One = TypeVar("One", bound=Asked)


def rows_of(asked: Iterable[One], measure: Callable[[One, int, int], Row]) -> Iterator[Row]:
    """A row for each, in order; a refused one is told, and followed by one with the smallest budget, once by its name.

    Every row has its "way", the name.

    Args:
        measure: ``measure(one, done, total)``, with the number of rows before it and of all that are known of.
    """
    waiting, measured, done = list(asked), set(), 0
    while waiting:
        one = waiting.pop(0)
        try:
            row = measure(one, done, done + 1 + len(waiting))
            measured.add(one.name)
        except BudgetTooSmall as error:
            row = _refused(error)
            smaller = None if one.at_least is None else one.at_least(error.minimum_bytes)
            if smaller is not None and smaller.name not in measured:
                waiting.insert(0, smaller)
        done += 1
        yield {"way": one.name, **row}


def _refused(error: BudgetTooSmall) -> Row:
    """Why a row has no numbers, short enough for a table, and the smallest budget, all live bytes counted."""
    text = str(error)
    why = (text.partition(": ")[2] or text).partition(", set by")[0].partition(". The smallest budget")[0]
    smallest = error.minimum_bytes
    return {"refused": f"{why}; the smallest budget is {format_bytes(smallest)}", "smallest_budget_bytes": smallest}
