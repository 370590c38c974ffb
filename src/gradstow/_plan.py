"""``gs.Plan``: the plan that users hold, print, save and load."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path

from gradstow._errors import StalePlan
from gradstow._files import write_text
from gradstow.ir import PlanData
from gradstow.planner import smallest_peak
from gradstow.report import Row, plan_rows, plan_text


class Plan(PlanData):
    """A plan for one model, one batch shape and one budget. ``print(plan)`` shows its table.

    Everything is in bytes and seconds. See ``PlanData`` for the fields.
    """

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """One row per stored, recomputed or freed value: bytes, decision, reason, shape, where it comes from."""
        return plan_rows(self)

    @cached_property
    def _smallest(self) -> tuple[int, int]:
        return smallest_peak(self.graph, self.costs)

    @property
    def minimum_peak_bytes(self) -> int:
        """The smallest total peak that the planner reaches for this step. The first call searches, for seconds."""
        return self.resident_bytes + max(self._smallest[0], self.optimizer_bytes)

    @property
    def minimum_peak_bound_bytes(self) -> int:
        """No schedule of this step is proven to have a total peak under this; searched for as above."""
        return self.resident_bytes + max(self._smallest[1], self.optimizer_bytes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, whole or not at all.

        Raises:
            GradstowError: the file cannot be written; what was there before still is.
        """
        write_text(path, self.dumps(), "the plan")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan from a file.

        Raises:
            StalePlan: the file is missing, damaged or of another format.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, TypeError, ValueError) as error:
            raise StalePlan(f"the plan file {path} cannot be read: {error}. Save one with plan.save.") from error
        return cls.loads(text, f"the plan file {path}")

    def __str__(self) -> str:
        return plan_text(self)

    def __repr__(self) -> str:
        from gradstow._units import format_bytes

        return (
            f"<Plan {self.graph.model} budget={self.budget} peak={format_bytes(self.predicted_peak_bytes)} "
            f"reruns={self.rerun_ops}>"
        )
