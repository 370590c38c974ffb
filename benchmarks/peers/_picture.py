"""A picture per model: step peak against time, all systems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradstow.report._picture import new_axes, save_figure
from peers._ahead import Point
from peers._settings import CODEGEN, COMPILE, OURS

_MARKS = {
    "plain": ("black", "o"),
    "checkpoint": ("#c0562f", "s"),
    "checkpoint_sequential": ("#d9a441", "D"),
    "selective": ("#8d5a97", "^"),
    "torch_remat": ("#7a4b2a", "P"),
    "own switch": ("#b03a5b", "v"),
    COMPILE: ("#5b7f3a", "X"),
    OURS["eager"]: ("#1f6f8b", "."),
    OURS["compiled"]: ("#123f6d", "."),
}


def draw(folder: Path, model: str, rows: Sequence[Mapping[str, Any]]) -> Path | None:
    """``peers_<model>.svg``, or None where nothing of the model was measured."""
    mine = [row for row in rows if row["model"] == model and row["outcome"] == "measured"]
    if not mine:
        return None
    figure, axes = new_axes()
    for peer in dict.fromkeys(row["peer"] for row in mine):
        found = sorted((Point.of(row) for row in mine if row["peer"] == peer), key=lambda point: point.peak)
        _series(axes, peer, found)
    title = f"{model}, batch {mine[0]['batch']}: one training step on {mine[0]['device']}"
    axes.set(title=title, xlabel="step peak, MiB", ylabel="time, as a multiple of plain eager's")
    axes.legend(frameon=False)
    folder.mkdir(parents=True, exist_ok=True)
    return save_figure(figure, folder / f"peers_{model}.svg")


def _series(axes: Any, peer: str, found: Sequence[Point]) -> None:
    """gradstow's points are one trade, and joined; those of others are ways of their own."""
    colour, mark = _MARKS.get(peer, ("#9a9a9a", "o"))
    ratios = [p.ratio for p in found]
    # a median may lie on an end of its interval
    apart = [[max(p.ratio - p.low, 0) for p in found], [max(p.high - p.ratio, 0) for p in found]]
    axes.errorbar(
        [p.peak for p in found],
        ratios,
        yerr=apart,
        color=colour,
        marker=mark,
        markersize=9 if peer in CODEGEN else 6,
        linestyle="-" if peer in CODEGEN else "none",
        linewidth=1.2,
        elinewidth=0.6,
        label=peer,
    )
