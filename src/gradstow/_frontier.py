"""``gs.frontier``: plans for all budgets of one training step."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradstow._plan import Plan
from gradstow.report import FrontierRow, frontier_json, frontier_picture, frontier_rows, frontier_text


@dataclass(frozen=True)
class Frontier:
    """Time against peak, from everything stored down to the smallest peak. ``print`` shows the table.

    Attributes:
        plans: one per budget, the highest first; each can be handed to ``stow(model, plan=...)``.
        proven_step_peak_bytes: no schedule of this step has a step peak under this.
    """

    plans: tuple[Plan, ...]
    proven_step_peak_bytes: int

    @property
    def rows(self) -> tuple[FrontierRow, ...]:
        """One row per point: bytes, seconds, the proven bound, reruns. Less memory never takes less time."""
        return frontier_rows(self.plans)

    def to_json(self) -> dict[str, Any]:
        return frontier_json(self.plans, self.proven_step_peak_bytes)

    def save_picture(self, path: str | os.PathLike[str]) -> Path:
        """Draw the frontier to a PNG, SVG or PDF file.

        Raises:
            GradstowError: matplotlib is not installed, or the file cannot be written.
        """
        return frontier_picture(path, self.plans, self.proven_step_peak_bytes)

    def __str__(self) -> str:
        return frontier_text(self.plans, self.proven_step_peak_bytes)
