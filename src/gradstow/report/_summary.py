"""The numbers at the top of a report, as data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gradstow._units import format_bytes
from gradstow.ir import Moment, PlanData, StepGraph, Timeline
from gradstow.report._names import module_path, short_target
from gradstow.report._rows import DECISIONS, Row, break_costs, plan_rows


@dataclass(frozen=True, slots=True)
class Place:
    """A moment of the step: which op of which module, in which part."""

    op: str
    module: str
    source: str
    part: str  # "forward", "backward", "recomputation", "optimizer" or "loss"

    def __str__(self) -> str:
        if self.part in ("optimizer", "loss"):
            return self.op
        where = f" of {self.module}" if self.module else ""
        source = f" ({self.source})" if self.source else ""
        return f"{self.op}{where}{source}, in the {self.part}"


@dataclass(frozen=True, slots=True)
class Share:
    """How many values a decision holds for, and their bytes."""

    values: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Break:
    """A graph break, and the bytes kept for the backward because a later graph reads what was made before it."""

    reason: str
    source: str
    nbytes: int

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"{self.reason}{where}{f', keeps {format_bytes(self.nbytes)}' if self.nbytes else ''}"


@dataclass(frozen=True, slots=True)
class Summary:
    """What a plan is about and what it predicts; bytes and seconds.

    Attributes:
        resident: bytes alive when the step starts, by what they are for.
        predicted_step_peak_bytes, plain_step_peak_bytes: the step's peak above what is resident.
        gap: how far the step time may be from the proven bound, relative to it.
        predicted_peak_bytes, plain_peak_bytes: all live bytes at the worst moment.
        peak_at, plain_peak_at: the moment of the total peak; None for a step without moments.
        decisions: for each decision how many values and bytes.
        breaks: graph breaks and what they cost.
        not_planned: what runs as plain PyTorch, with its number of forward ops: the loss, ops outside of any graph.
        outside_bytes: room that is left for the latter.
        lossy: how many values are kept as which code that is not exact; empty where the numbers are plain PyTorch's.
        wait_seconds: of the step time, for values that are still on their way.
    """

    model: str
    batch: str
    device: str
    versions: Mapping[str, str]
    budget: str
    policy: str
    resident: Mapping[str, int]
    resident_bytes: int
    predicted_step_peak_bytes: int
    plain_step_peak_bytes: int
    predicted_peak_bytes: int
    plain_peak_bytes: int
    peak_at: Place | None
    plain_peak_at: Place | None
    predicted_seconds: float
    plain_seconds: float
    lower_bound_seconds: float
    gap: float
    rerun_ops: int
    decisions: Mapping[str, Share]
    breaks: tuple[Break, ...] = ()
    not_planned: Mapping[str, int] = field(default_factory=dict)
    outside_bytes: int = 0
    lossy: Mapping[str, int] = field(default_factory=dict)
    wait_seconds: float = 0.0
    solver: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["decisions"] = {k: {"values": s.values, "bytes": s.nbytes} for k, s in self.decisions.items()}
        data["breaks"] = [{"reason": b.reason, "source": b.source, "bytes": b.nbytes} for b in self.breaks]
        data["versions"] = dict(self.versions)
        return data


def summarize(plan: PlanData, rows: tuple[Row, ...] | None = None) -> Summary:
    """The numbers of a plan; ``rows`` saves making them twice."""
    graph, rows = plan.graph, plan_rows(plan) if rows is None else rows
    resident = {k: int(v) for k, v in asdict(graph.resident).items()}
    return Summary(
        model=graph.model,
        batch=batch_text(graph.batch),
        device=_device(plan),
        versions=dict(graph.versions),
        budget=plan.budget,
        policy=plan.policy,
        resident=resident,
        resident_bytes=plan.resident_bytes,
        predicted_step_peak_bytes=plan.predicted_step_peak_bytes,
        plain_step_peak_bytes=plan.plain_step_peak_bytes,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        plain_peak_bytes=plan.plain_peak_bytes,
        peak_at=_peak_at(graph, plan.timeline, plan.optimizer_bytes),
        plain_peak_at=_peak_at(graph, plan.plain_timeline, plan.optimizer_bytes),
        predicted_seconds=plan.predicted_seconds,
        plain_seconds=plan.plain_seconds,
        lower_bound_seconds=plan.lower_bound_seconds,
        gap=plan.gap,
        rerun_ops=plan.rerun_ops,
        decisions={d: _share(rows, d) for d in DECISIONS},
        breaks=_breaks(plan),
        not_planned=_not_planned(graph),
        outside_bytes=graph.outside_bytes,
        lossy=plan.lossy,
        wait_seconds=plan.timeline.wait_seconds,
        solver=dict(plan.solver),
    )


def _breaks(plan: PlanData) -> tuple[Break, ...]:
    pairs = zip(plan.graph.breaks, break_costs(plan), strict=True)
    return tuple(Break(b.reason, b.source, cost) for b, cost in pairs)


def _device(plan: PlanData) -> str:
    elsewhere = ":" in plan.costs.device and plan.graph.device == "cpu"  # a profile, not what was captured on
    return f"{plan.graph.device}, priced for {plan.costs.device}" if elsewhere else plan.graph.device


def batch_text(signature: str) -> str:
    """The tensors of a batch's signature, as ``int64[2, 128]``, without the containers around them."""
    tensors = re.findall(r"\(([\d, ]*?),?\)(\w+)", signature)
    return ", ".join(f"{dtype}[{shape}]" for shape, dtype in tensors) or signature


def _not_planned(graph: StepGraph) -> dict[str, int]:
    found = {r.name: sum(not op.backward and not op.view for op in r.ops) for r in graph.regions if not r.managed}
    if graph.outside:
        found[f"outside of any graph: {', '.join(dict.fromkeys(graph.outside))}"] = len(graph.outside)
    return found


def _share(rows: tuple[Row, ...], decision: str) -> Share:
    found = [row.nbytes for row in rows if row.decision == decision]
    return Share(len(found), sum(found))


def _peak_at(graph: StepGraph, timeline: Timeline, optimizer_bytes: int) -> Place | None:
    if optimizer_bytes > timeline.peak_bytes:
        return Place("optimizer.step", "", "", "optimizer")
    return place(graph, timeline.moments[timeline.peak_index]) if timeline.moments else None


def place(graph: StepGraph, moment: Moment) -> Place:
    """Where in the user's model a moment of the timeline is."""
    if moment.op < 0:
        return Place("the loss, for which room is reserved", "", "", "loss")
    op = graph.regions[moment.region].ops[moment.op]
    part = "recomputation" if moment.recompute else "backward" if moment.backward else "forward"
    return Place(short_target(op.target), module_path(op.module), op.source, part)
