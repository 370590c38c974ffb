"""What a conversion did: data first, then its text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from gradstow._units import format_bytes
from gradstow.layers._savers import Saves


@dataclass
class Swap:
    """One module that got a lean class.

    Attributes:
        path: of the module in the model; "" is the model itself.
        module, old, new: the module, the class that it had, and the one that it has.
        keeps: in words, what the lean form keeps for the backward.
        saved_before, saved_after: bytes that it (or a module in it that was not swapped) keeps first, without and
            with; None where no batch was given. What a neighbour keeps first counts there.
    """

    path: str
    module: nn.Module
    old: type[nn.Module]
    new: type[nn.Module]
    keeps: str
    saved_before: int | None = None
    saved_after: int | None = None


@dataclass
class Conversion:
    """What ``convert`` swapped and left.

    Attributes:
        swaps: one per swapped module.
        left: why a module of a kind that has a lean form was left, by path.
        saved_before, saved_after: bytes that one training forward keeps for its backward, parameters, buffers and the
            batch not counted; None where no batch was given.
    """

    swaps: tuple[Swap, ...]
    left: dict[str, str]
    saved_before: int | None = None
    saved_after: int | None = None
    _undone: bool = field(default=False, repr=False)

    def undo(self) -> None:
        """Give every swapped module its class back, where it still has the lean one. Twice does nothing."""
        if not self._undone:
            for swap in self.swaps:
                if type(swap.module) is swap.new:  # else somebody gave it another class since, such as parametrizations
                    swap.module.__class__ = swap.old
                    swap.module.__dict__.pop("saves", None)
        self._undone = True

    def count(self, before: Saves, after: Saves) -> None:
        """Fill in the bytes, and what each keeps, now that that is decided."""
        from gradstow.layers import _lean

        self.saved_before, self.saved_after = before.total, after.total
        paths = [swap.path for swap in self.swaps]
        old, new = before.by_owner(paths), after.by_owner(paths)
        for swap in self.swaps:
            swap.keeps = _lean.keeps(swap.module)
            swap.saved_before, swap.saved_after = old[swap.path], new[swap.path]

    def to_json(self) -> str:
        """All of it as JSON; bytes are integers."""
        swaps = [
            {
                "path": s.path,
                "from": s.old.__name__,
                "to": s.new.__name__,
                "keeps": s.keeps,
                "saved_before_bytes": s.saved_before,
                "saved_after_bytes": s.saved_after,
            }
            for s in self.swaps
        ]
        total = {"saved_before_bytes": self.saved_before, "saved_after_bytes": self.saved_after}
        return json.dumps({"swaps": swaps, "left": self.left, **total}, indent=1)

    def __str__(self) -> str:
        kinds = len({(s.old, s.new) for s in self.swaps})
        lines = [f"{len(self.swaps)} modules of {kinds} kinds converted, {len(self.left)} left"]
        if self.saved_before is not None and self.saved_after is not None:
            after, before = format_bytes(self.saved_after), format_bytes(self.saved_before)
            share = f" ({100 * self.saved_after / self.saved_before:.0f} %)" if self.saved_before else ""
            lines[0] += f"; a forward keeps {after} instead of {before}{share}"
        lines += [_line(row) for row in _together(self.swaps)]
        reasons: dict[str, list[str]] = {}
        for path, reason in self.left.items():
            reasons.setdefault(reason, []).append(path or "the model itself")
        lines += [f"left: {_few(paths)}: {reason}" for reason, paths in reasons.items()]
        return "\n".join(lines)


def _together(swaps: Iterable[Swap]) -> list[list[Swap]]:
    """Alike swaps in one row, in the order of the model."""
    rows: dict[Any, list[Swap]] = {}
    for swap in swaps:
        rows.setdefault((swap.old, swap.keeps), []).append(swap)
    return list(rows.values())


def _line(row: list[Swap]) -> str:
    first = row[0]
    counted = ""
    if first.saved_before is not None:
        before, after = sum(s.saved_before or 0 for s in row), sum(s.saved_after or 0 for s in row)
        counted = f"  {format_bytes(before)} -> {format_bytes(after)}"
    return f"{first.old.__name__:<18} ×{len(row):<4} {_few([s.path for s in row]):<28} keeps {first.keeps}{counted}"


def _few(paths: list[str]) -> str:
    shown = ", ".join(path or "the model itself" for path in paths[:2])
    return f"{shown}, …" if len(paths) > 2 else shown
