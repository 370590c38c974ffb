"""A finished plan as data: what was captured, what was decided, what it is expected to cost."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

from gradstow._codes import CODES
from gradstow._errors import StalePlan
from gradstow._units import parse_budget
from gradstow.ir._cost import CostTable
from gradstow.ir._graph import StepGraph
from gradstow.ir._replay import Timeline, replay
from gradstow.ir._schedule import Schedule

FORMAT = 3


@dataclass(frozen=True)
class PlanData:
    """Everything that execution and reports need to know. Immutable; all bytes are int, all times seconds.

    Attributes:
        graph, schedule, costs: the step, the decisions, the price list.
        plain: the schedule of plain PyTorch on the same graph (everything stored, nothing written over).
        budget: the budget as the user wrote it, normalised to text ("6.0 GiB", "60%").
        policy: name of the policy that decided ("auto", "store-all", ...).
        lower_bound_seconds: proven bound on the step time of any plan of this kind at this budget.
        solver: how the plan was found, for the report.
    """

    graph: StepGraph
    schedule: Schedule
    plain: Schedule
    costs: CostTable
    budget: str = ""
    policy: str = "auto"
    lower_bound_seconds: float = 0.0
    solver: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step under the plan."""
        return replay(self.graph, self.schedule, self.costs)

    @cached_property
    def plain_timeline(self) -> Timeline:
        """The simulated step of plain PyTorch."""
        return replay(self.graph, self.plain, self.costs, plain=True)

    @property
    def resident_bytes(self) -> int:
        """Alive when the step starts: parameters, buffers, gradients, optimizer state, batch."""
        return self.graph.resident.total

    @property
    def predicted_step_peak_bytes(self) -> int:
        """Peak of zero_grad, forward, loss, backward above ``resident_bytes``."""
        return self.timeline.peak_bytes

    @property
    def plain_step_peak_bytes(self) -> int:
        """The same for plain PyTorch."""
        return self.plain_timeline.peak_bytes

    @property
    def predicted_peak_bytes(self) -> int:
        """All live bytes of training at the worst moment, ``optimizer.step`` included where it is known."""
        return self.resident_bytes + max(self.timeline.peak_bytes, self.optimizer_bytes)

    @property
    def plain_peak_bytes(self) -> int:
        """The same for plain PyTorch."""
        return self.resident_bytes + max(self.plain_timeline.peak_bytes, self.optimizer_bytes)

    @property
    def optimizer_bytes(self) -> int:
        """Gradients, held outputs and working memory while ``optimizer.step`` runs, above ``resident_bytes``."""
        if not self.graph.optimizer_peak_bytes:
            return 0
        return self.timeline.end_bytes + self.graph.optimizer_peak_bytes

    @property
    def step_budget_bytes(self) -> int | None:
        """The budget as bytes for the step, above ``resident_bytes``; None without one."""
        budget = parse_budget(self.budget) if self.budget else None
        if budget is None or budget.percent is None:
            return None if budget is None or budget.total_bytes is None else budget.total_bytes - self.resident_bytes
        return int(budget.percent / 100 * self.plain_step_peak_bytes)

    @property
    def predicted_seconds(self) -> float:
        """Sum of the measured op times of the planned step."""
        return self.timeline.seconds

    @property
    def plain_seconds(self) -> float:
        """Sum of the measured op times of the plain step."""
        return self.plain_timeline.seconds

    @property
    def saved_bytes(self) -> int:
        """What crosses from the forward to the backward, each storage once."""
        return self._saved(self.schedule, plain=False)

    @property
    def plain_saved_bytes(self) -> int:
        """The same for plain PyTorch."""
        return self._saved(self.plain, plain=True)

    def _saved(self, schedule: Schedule, *, plain: bool) -> int:
        pairs = zip(self.graph.regions, schedule.regions, strict=True)
        kept = {region.storages[s].origin or (r, s) for r, (region, own) in enumerate(pairs) for s in own.kept}
        storages = [self.graph.regions[r].storages[s] for r, s in kept]
        return sum(s.plain_nbytes if plain and s.plain_nbytes >= 0 else s.nbytes for s in storages)

    @property
    def gap(self) -> float:
        """How far the step time may be from the best possible: (predicted - bound) / bound; 0 is proven optimal."""
        if not self.lower_bound_seconds:
            return 0.0
        return max(self.predicted_seconds / self.lower_bound_seconds - 1, 0.0)

    @cached_property
    def rerun_ops(self) -> int:
        """How many forward ops run again in the backward; views, which cost nothing, and decoding do not count."""
        regions = self.graph.regions
        again = (regions[m.region].ops[m.op] for m in self.timeline.moments if m.recompute)
        return sum(not (op.view or op.lazy or (op.rerun is not None and op.rerun.code)) for op in again)

    @cached_property
    def lossy(self) -> dict[str, int]:
        """How many values are kept as which code that is not exact."""
        again = {(m.region, m.op) for m in self.timeline.moments if m.recompute}
        reruns = [self.graph.regions[r].ops[op].rerun for r, op in sorted(again)]
        return dict(Counter(rerun.code for rerun in reruns if rerun is not None and rerun.code in CODES))

    def to_json(self) -> dict[str, Any]:
        return {
            "graph": self.graph.to_json(),
            "schedule": self.schedule.to_json(),
            "plain": self.plain.to_json(),
            "costs": self.costs.to_json(),
            "budget": self.budget,
            "policy": self.policy,
            "lower_bound_seconds": self.lower_bound_seconds,
            "solver": dict(self.solver),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(
            graph=StepGraph.from_json(data["graph"]),
            schedule=Schedule.from_json(data["schedule"]),
            plain=Schedule.from_json(data["plain"]),
            costs=CostTable.from_json(data["costs"]),
            budget=data["budget"],
            policy=data["policy"],
            lower_bound_seconds=data["lower_bound_seconds"],
            solver=data["solver"],
        )

    def dumps(self) -> str:
        """The plan file's text: the same plan always gives the same text."""
        body = json.dumps(self.to_json(), separators=(",", ":"), sort_keys=True)
        head = {"gradstow_plan": FORMAT, "sha256": _digest(body)}
        return json.dumps(head, sort_keys=True) + "\n" + body + "\n"

    @classmethod
    def loads(cls, text: str, source: str = "the plan file") -> Self:
        """Read a plan file's text.

        Raises:
            StalePlan: damaged, or of another format.
        """
        head, _, body = text.partition("\n")
        try:
            meta = json.loads(head)
            if not isinstance(meta, dict) or "gradstow_plan" not in meta:
                raise ValueError("its first line is not a gradstow plan's")
            if meta["gradstow_plan"] != FORMAT:
                raise ValueError(f"its format is {meta['gradstow_plan']}, this version reads {FORMAT}")
            if meta["sha256"] != _digest(body.strip()):
                raise ValueError("its checksum does not fit its content")
            return cls.from_json(json.loads(body))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StalePlan(f"{source} cannot be used: {error}. Plan again with gs.plan and save it.") from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
