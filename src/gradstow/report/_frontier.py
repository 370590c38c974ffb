"""Time against peak: the points of a frontier as rows, text, JSON and a picture."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradstow._units import format_bytes, format_seconds
from gradstow.ir import PlanData
from gradstow.report._picture import new_axes, save_figure

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class FrontierRow:
    """One point.

    Attributes:
        step_peak_bytes: predicted peak of the step above what is resident; ``peak_bytes`` is the total.
        share: of plain PyTorch's step peak.
        seconds: predicted step time; ``added`` is relative to plain PyTorch's.
        bound_added: proven lower bound on ``added`` for any schedule within that point's budget.
    """

    step_peak_bytes: int
    peak_bytes: int
    share: float
    seconds: float
    added: float
    bound_added: float
    rerun_ops: int


def frontier_rows(plans: Sequence[PlanData]) -> tuple[FrontierRow, ...]:
    return tuple(
        FrontierRow(
            step_peak_bytes=plan.predicted_step_peak_bytes,
            peak_bytes=plan.predicted_peak_bytes,
            share=plan.predicted_step_peak_bytes / max(plan.plain_step_peak_bytes, 1),
            seconds=plan.predicted_seconds,
            added=plan.predicted_seconds / plan.plain_seconds - 1 if plan.plain_seconds else 0.0,
            bound_added=plan.lower_bound_seconds / plan.plain_seconds - 1 if plan.plain_seconds else 0.0,
            rerun_ops=plan.rerun_ops,
        )
        for plan in plans
    )


def frontier_json(plans: Sequence[PlanData], proven_step_peak_bytes: int) -> dict[str, Any]:
    first = plans[0]
    return {
        "model": first.graph.model,
        "resident_bytes": first.resident_bytes,
        "plain_step_peak_bytes": first.plain_step_peak_bytes,
        "plain_seconds": first.plain_seconds,
        "proven_step_peak_bytes": proven_step_peak_bytes,
        "points": [asdict(row) for row in frontier_rows(plans)],
    }


def frontier_text(plans: Sequence[PlanData], proven_step_peak_bytes: int) -> str:
    first, rows = plans[0], frontier_rows(plans)
    plain, seconds = format_bytes(first.plain_step_peak_bytes), format_seconds(first.plain_seconds)
    least, proven = format_bytes(rows[-1].step_peak_bytes), format_bytes(proven_step_peak_bytes)
    lines = [
        f"Frontier of {first.graph.model}: plain PyTorch needs {plain} for a step of {seconds}, "
        f"above {format_bytes(first.resident_bytes)} that are resident",
        f"smallest step peak {least}; no schedule is under {proven} (proven)",
        "",
        f"{'step peak':>12} {'of plain':>9} {'time added':>11} {'proven >=':>10} {'reruns':>7}",
    ]
    lines += [
        f"{format_bytes(r.step_peak_bytes):>12} {100 * r.share:>7.0f} % {100 * r.added:>+9.2f} % "
        f"{100 * r.bound_added:>+8.2f} % {r.rerun_ops:>7}"
        for r in rows
    ]
    return "\n".join(lines)


def frontier_picture(path: str | os.PathLike[str], plans: Sequence[PlanData], proven_step_peak_bytes: int) -> Path:
    """Draw time added against step peak to a PNG, SVG or PDF file (by its ending) and return its path.

    Raises:
        GradstowError: matplotlib is not installed, or the file cannot be written.
    """
    rows = frontier_rows(plans)
    figure, axes = new_axes()
    peaks = [row.step_peak_bytes / _MIB for row in rows]
    axes.fill_between(
        peaks, [100 * r.bound_added for r in rows], color="#9a9a9a", alpha=0.25, label="proven out of reach"
    )
    axes.plot(peaks, [100 * r.added for r in rows], "o-", color="#1f6f8b", markersize=4, linewidth=1.2, label="plans")
    axes.axvline(proven_step_peak_bytes / _MIB, color="black", linestyle=":", linewidth=1, label="no schedule is under")
    axes.set(
        title=f"{plans[0].graph.model}: time against memory",
        xlabel="step peak, MiB above what is resident",
        ylabel="predicted time added, %",
    )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper right")
    return save_figure(figure, path)
