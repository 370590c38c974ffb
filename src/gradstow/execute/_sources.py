"""Where an executor gets the schedule of a graph that turns up: from plans, or by storing all and taking notes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import fx

from gradstow._errors import StalePlan
from gradstow.capture import (
    CompiledGraph,
    InputRole,
    StepLog,
    boxed,
    build_region,
    fingerprint,
    is_tangent,
    normalize,
    on_real_tensors,
    was_told,
)
from gradstow.cost import measured_costs, timing_limit
from gradstow.execute._inductor import compiled_peak
from gradstow.execute._program import RegionProgram
from gradstow.ir import OpCost, PlanData, Region, RegionSchedule, Resident, StepGraph, just_in_time, replay

Boxed = Callable[[list[Any]], Any]
Alone = Callable[[Region], RegionSchedule]


class UnknownGraph(StalePlan):
    """A graph turned up that no plan knows, before anything of this step ran."""


@dataclass(frozen=True, slots=True)
class Excess:
    """What compiled code takes beside its plan, in bytes, and by how much the budget is too small for it."""

    beside: int = 0
    over: int = 0

    def margin(self, before: int) -> int:
        """How much of the budget to leave free in the next plan, more than ``before``."""
        return max(self.beside, before + self.over)


class OverPlanned(Exception):
    """Compiled code needs more than its region's part of the budget; nothing of this step has run."""

    def __init__(self, excess: Excess) -> None:
        super().__init__(f"compiled code needs {excess.over} bytes more than allowed")
        self.excess = excess


class Source(Protocol):
    """``find`` decides for a graph; ``forward`` and ``backward`` give the code that runs for it.

    ``told``: whether a model that asks hears that it is being compiled.
    """

    @property
    def told(self) -> bool: ...
    def find(self, raw: fx.GraphModule, num_outputs: int, *, begun: bool) -> tuple[Region, RegionSchedule]: ...
    def forward(self, program: RegionProgram) -> Boxed: ...
    def backward(self, program: RegionProgram) -> Boxed: ...
    def check(self, program: RegionProgram, *, begun: bool) -> None: ...


class Planned:
    """Graphs that one of some plans knows.

    Attributes:
        plans: the newest last.
        alone: plans a graph that turns up in the middle of a step and that no plan knows.
        unknown: such a graph turned up.
        grew: more graphs ran in a step than planned.
        excess: of compiled code that was found to need too much in the middle of a step.
    """

    def __init__(self, plans: list[PlanData], *, strict: bool, alone: Alone) -> None:
        self.plans, self.strict, self.alone = plans, strict, alone
        self.unknown = self.grew = False
        self.excess = Excess()

    @property
    def told(self) -> bool:
        return was_told(self.plans[-1].graph)

    def find(self, raw: fx.GraphModule, num_outputs: int, *, begun: bool) -> tuple[Region, RegionSchedule]:
        """The region and its schedule. ``begun``: something of this step ran already, so it must go on.

        Raises:
            UnknownGraph: no plan knows the graph.
        """
        found = fingerprint(raw, num_outputs)
        known = [pair for plan in reversed(self.plans) for pair in _managed(plan)]
        for region, schedule in known:
            if region.fingerprint == found:
                return region, schedule
        if begun and not self.strict:
            self.unknown = True
            graph = graph_alone(raw, num_outputs, self.plans[-1].graph.device, self.plans[-1].graph.codegen)
            region = graph.regions[0]
            return region, self.alone(region)
        planned = ", ".join(region.fingerprint for region, _ in known)
        raise UnknownGraph(
            f"the graph that runs ({found}) is none of the planned ones ({planned}): the model, its attributes, its "
            "train/eval flags, the batch or torch changed since planning, or a hook that planning leaves out computes "
            "with tensors. The model is plain again: stow it with budget=, which plans the graph that really runs."
        )

    def forward(self, program: RegionProgram) -> Boxed:
        return program.forward

    def backward(self, program: RegionProgram) -> Boxed:
        return boxed(program.run_backward)

    def check(self, program: RegionProgram, *, begun: bool) -> None:
        """Whether what was compiled of a region needs no more than it may.

        Raises:
            OverPlanned: it does, and the step has not begun.
        """
        plan = next((p for p in self.plans if any(r is program.region for r in p.graph.regions)), None)
        allowed = None if plan is None else plan.step_budget_bytes
        if plan is None or allowed is None or program.compiled is None:
            return
        alone = _peak_alone(plan, program.region)
        needed = compiled_peak(
            *program.compiled,
            program.num_forward_outputs,
            plan.costs.costs,
            held=program.region.held,
            price=partial(_measured, plan.graph.device, timing_limit(allowed + plan.resident_bytes)),
        )
        if needed is None:
            return
        beside = needed - alone
        excess = Excess(beside, plan.predicted_step_peak_bytes + beside - allowed)
        if excess.over > 0 and not begun:
            raise OverPlanned(excess)
        if excess.over > self.excess.over:
            self.excess = excess


class Recorded:
    """Any graph: everything is stored, and what ran is noted in ``log``, so that the next step can be planned."""

    def __init__(self, module: torch.nn.Module, device: str, *, told: bool = False) -> None:
        self._module, self._device, self.told = weakref.ref(module), device, told
        self._graphs: dict[int, CompiledGraph] = {}
        self.start()

    def start(self) -> None:
        """Begin the notes of a new step."""
        module = self._module()
        self.log = StepLog([] if module is None else [p for p in module.parameters() if p.requires_grad])

    def find(self, raw: fx.GraphModule, num_outputs: int, *, begun: bool) -> tuple[Region, RegionSchedule]:
        return store_all(raw, num_outputs, self._device)

    def forward(self, program: RegionProgram) -> Boxed:
        graph = self._graph(program)
        return boxed(lambda args: self.log.forward(graph, program.forward, args))

    def backward(self, program: RegionProgram) -> Boxed:
        graph = self._graph(program)

        def run(args: list[Any]) -> Any:
            saved = len(program.lowered.saved)
            self.log.backward(graph, args[:saved], [t is not None for t in args[saved:]])
            return program.run_backward(args)

        return boxed(run)

    def check(self, program: RegionProgram, *, begun: bool) -> None:
        """Nothing is promised of a step that is recorded."""

    def _graph(self, program: RegionProgram) -> CompiledGraph:
        return self._graphs.setdefault(
            id(program),
            CompiledGraph(program.raw, program.num_forward_outputs, mutated=program.changed, end=program.end),
        )


def _measured(device: str, limit_bytes: int, signatures: Sequence[str]) -> Mapping[str, OpCost]:
    """Prices of library calls, taken while a graph is compiled, of which nothing runs yet."""
    with on_real_tensors():
        return measured_costs(signatures, device, limit_bytes).costs


def _peak_alone(plan: PlanData, region: Region) -> int:
    """What is planned for a region, without the rest of the step."""
    index = next(i for i, r in enumerate(plan.graph.regions) if r is region)
    reserve = min(plan.graph.reserve_bytes, 1)  # a loss outside of the model: who holds which gradient depends on it
    graph = replace(plan.graph, regions=(region,), reserve_bytes=reserve, outside_bytes=0)
    schedule = replace(plan.schedule, regions=(plan.schedule.regions[index],))
    return replay(graph, schedule, plan.costs).peak_bytes


def store_all(raw: fx.GraphModule, num_outputs: int, device: str) -> tuple[Region, RegionSchedule]:
    """A region for a graph that nobody planned, and the schedule that keeps all it can."""
    region = graph_alone(raw, num_outputs, device, "eager").regions[0]
    return region, just_in_time(region, range(len(region.storages)))


def graph_alone(raw: fx.GraphModule, num_outputs: int, device: str, codegen: str, *, steady: bool = False) -> StepGraph:
    """A step of one region, of which nobody knows what comes before and after it.

    All its outputs may get gradients. Its buffers may change before its backward, unless it is ``steady``.
    """
    primals = [n for n in raw.graph.find_nodes(op="placeholder") if not is_tangent(n)]
    vals = [n.meta.get("val") for n in primals]
    fixed = [i for i, v in enumerate(vals) if isinstance(v, torch.Tensor) and not v.requires_grad]
    buffers = [] if steady else fixed
    roles, print_ = [InputRole()] * len(primals), fingerprint(raw, num_outputs)
    joint = build_region(
        normalize(raw),
        num_outputs,
        roles,
        print_=print_,
        held=True,
        device=device,
        changed=buffers,
        fused=codegen == "inductor",
    )
    return StepGraph((joint.region,), Resident(), device=device, codegen=codegen)


def _managed(plan: PlanData) -> list[tuple[Region, RegionSchedule]]:
    pairs = zip(plan.graph.regions, plan.schedule.regions, strict=True)
    return [(region, schedule) for region, schedule in pairs if region.managed]
