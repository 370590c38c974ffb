"""Live memory over a step, drawn: one curve per run, the budget as a line."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradstow._errors import GradstowError
from gradstow._files import write_bytes

_MIB = 2**20
_COLOURS = ("#9a9a9a", "#1f6f8b", "#c0562f", "#5b7f3a")


@dataclass(frozen=True, slots=True)
class Curve:
    """A run's memory: (seconds, live bytes) in time order, as ``measure_peak().timeline`` gives it."""

    name: str
    points: Sequence[tuple[float, int]]

    @property
    def peak_bytes(self) -> int:
        return max((level for _, level in self.points), default=0)


def memory_picture(
    path: str | os.PathLike[str],
    curves: Sequence[Curve],
    *,
    budget_bytes: int | None = None,
    title: str = "Live memory over one training step",
) -> Path:
    """Draw the curves to a PNG, SVG or PDF file (by its ending) and return its path.

    Raises:
        GradstowError: matplotlib is not installed, or the file cannot be written.
    """
    figure, axes = new_axes()
    for curve, colour in zip(curves, _COLOURS * len(curves), strict=False):
        times = [seconds for seconds, _ in curve.points]
        levels = [level / _MIB for _, level in curve.points]
        label = f"{curve.name}, peak {_mib(curve.peak_bytes)}"
        axes.fill_between(times, levels, step="post", color=colour, alpha=0.18, linewidth=0)
        axes.step(times, levels, where="post", color=colour, linewidth=1.2, label=label)
    if budget_bytes is not None:
        label = f"budget {_mib(budget_bytes)}"
        axes.axhline(budget_bytes / _MIB, color="black", linestyle="--", linewidth=1, label=label)
    axes.set(title=title, xlabel="seconds", ylabel="MiB above what was resident")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper right")
    return save_figure(figure, path)


def new_axes() -> tuple[Any, Any]:
    """A figure and its axes, without a window system.

    Raises:
        GradstowError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise GradstowError(
            "the picture needs matplotlib, which is not installed. Run: pip install 'gradstow[report]'"
        ) from error
    figure = Figure(figsize=(9, 4.5), layout="constrained")  # no pyplot: it would choose a window system
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save_figure(figure: Any, path: str | os.PathLike[str]) -> Path:
    """Write the figure, in the format that the file's ending names.

    Raises:
        GradstowError: the file cannot be written.
    """
    drawn = io.BytesIO()
    try:
        figure.savefig(drawn, dpi=150, format=Path(path).suffix[1:].lower() or None)
    except ValueError as error:  # a format that matplotlib does not know
        raise GradstowError(f"the picture cannot be written to {path}: {error}.") from error
    return write_bytes(path, drawn.getvalue(), "the picture")


def _mib(count: int) -> str:
    """In the unit of the axis, and fine enough to tell a peak from its budget."""
    return f"{count / _MIB:,.1f} MiB"
