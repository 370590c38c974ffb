"""capture → cost → plan: what is known of a step becomes a Plan."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from gradstow._codes import EXACT, is_place
from gradstow._coding import asks_for_codes, codes_of_rules, every_code, together, with_time, worthwhile
from gradstow._errors import BudgetTooSmall, CaptureError, GradstowError
from gradstow._plan import Plan
from gradstow._plan_cache import keep_plan, kept_plan, plan_key
from gradstow._units import Budget, format_bytes, parse_budget
from gradstow._wanted import Wanted
from gradstow.actions import LOSSLESS, Action, Codes
from gradstow.capture import Captured, RehearsalFailed, Step, aten_names, capture, device_of, tensors
from gradstow.cost import analytic_costs, kernel_costs, measured_costs, timing_limit, transfer_costs
from gradstow.ir import CostTable, OpCost, RegionSchedule, StepGraph
from gradstow.offload import check_place
from gradstow.planner import Effort, make_plan, optimizer_peak, plain_step_peak, smallest_peak, store_all_peak
from gradstow.planner import frontier as find_frontier

_NO_GAIN = 0.003  # added time, as a part of the plain step's, that no other way of planning is tried for
_TRIED = 2  # choices of codes that are planned with a solver, those that look best without
_HEADROOM = 0.1  # share of the free memory that "auto" leaves alone


def plan_step(model: torch.nn.Module, step: Step, wanted: Wanted) -> Plan:
    """Capture, price and plan one step. Allocates at most one op at a time."""
    return plan_captured(capture_step(model, step, wanted), wanted)


def capture_step(model: torch.nn.Module, step: Step, wanted: Wanted) -> Captured:
    """Rehearse a step that can be planned."""
    check_devices(model, (step.inputs, step.batch))
    _check_training(model, step.optimizer)
    wanted.say("rehearse", 0, 1)
    captured = capture(model, step, wanted.codegen)
    wanted.say("rehearse", 1, 1)
    return captured


@contextlib.contextmanager
def users_errors() -> Iterator[None]:
    """An error that the model itself raises on purpose reaches the user as it is."""
    own: Exception | None = None
    try:
        yield
    except RehearsalFailed as error:
        own = error.users_own
        if own is None:
            raise
    if own is not None:
        raise own


@dataclass(frozen=True, slots=True)
class Priced:
    """A graph with the price of every op of it."""

    graph: StepGraph
    costs: CostTable


def price(graph: StepGraph, wanted: Wanted) -> Priced:
    """By a profile, or measured where the cache does not know the price. What needs too much is measured smaller."""
    costs = _prices(_signatures(graph), graph.device, wanted)
    return Priced(_with_room(graph, costs), costs)


def _prices(texts: Sequence[str], device: str, wanted: Wanted) -> CostTable:
    moves = transfer_costs(texts, device, wanted.profile) | kernel_costs(texts, device, wanted.profile)
    ops = [text for text in texts if text not in moves]
    if wanted.profile is not None:
        costs = analytic_costs(ops, wanted.profile)
    else:
        given = None if wanted.budget is None else wanted.budget.total_bytes
        limit, say = timing_limit(given), partial(wanted.say, "time ops")
        costs = measured_costs(ops, device, limit, say)
    return replace(costs, costs={**costs.costs, **moves}) if moves else costs


@dataclass(frozen=True, slots=True)
class _Pricer:
    """Prices the graphs that can be made of a step. ``seen``: every price that it has named."""

    captured: Captured
    wanted: Wanted
    seen: dict[str, OpCost] = field(default_factory=dict)

    def of(self, graph: StepGraph) -> Priced:
        priced = price(graph, self.wanted)
        self.seen.update(priced.costs.costs)
        return priced

    @property
    def exact(self) -> Sequence[Action]:
        """The exact codes that are allowed."""
        return LOSSLESS if "compress" in self.wanted.actions else ()

    def coded(self, codes: Codes) -> Priced:
        """With what is allowed of the exact codes, and others for some values."""
        return self.of(self.captured.graph(self.exact, codes))


def plan_captured(captured: Captured, wanted: Wanted) -> Plan:
    """Price and plan a step that is captured, or read its plan where another process has planned the same.

    Codes are tried only where storing everything does not fit, so that a large budget costs nothing, or where rules
    ask for them. Of the plans without codes, with exact ones, lossy ones and elsewhere the fastest is taken.
    """
    graph, pricer = captured.graph(), _Pricer(captured, wanted)
    ruled = _ruled(graph, wanted)
    key = plan_key(graph, captured.facts, wanted)
    known = kept_plan(key, lambda texts: _prices(texts, graph.device, wanted).costs)
    if known is not None:
        wanted.say("known plan", 1, 1)
        return known
    bare = pricer.of(graph)
    simple = not asks_for_codes(wanted.policy) and (wanted.policy.name != "auto" or _stores_all(bare, wanted))
    try:
        plan, whole = _fastest([bare] if simple else _ways(pricer, bare, ruled), wanted)
    except BudgetTooSmall as refused:
        plan, whole = _smallest(pricer, bare, ruled, refused)
    if whole:
        keep_plan(key, plan, pricer.seen)
    return plan


def plan_frontier(captured: Captured, wanted: Wanted, points: int) -> tuple[list[Plan], int]:
    """Plans from everything stored down to the smallest peak: less time always for more memory.

    Second comes the highest step peak that none of the tried ways to keep values has a schedule under.
    """
    pricer = _Pricer(captured, wanted)
    bare = pricer.of(captured.graph())
    proven: list[int] = []
    ways: list[list[Plan]] = []
    for priced in _ways(pricer, bare, _ruled(bare.graph, wanted)):
        plans, least = find_frontier(
            priced.graph,
            priced.costs,
            points=points,
            kind=Plan,
            policy=wanted.policy,
            known_ops=aten_names() if wanted.policy.rules else (),
            recompute="recompute" in wanted.actions,
            progress=partial(wanted.say, "plan"),
        )
        ways.append([plan for plan in plans if isinstance(plan, Plan)])
        proven.append(least)
    chosen = _fastest_within([plan for way in ways for plan in way], points)
    return [replace(plan, lower_bound_seconds=_bound(plan, ways)) for plan in chosen], min(proven)


def _bound(plan: Plan, ways: list[list[Plan]]) -> float:
    """What is proven for a plan's peak: of each way, the bound at the smallest budget that is not under it, or at its
    largest one."""

    def budget(other: Plan) -> int:
        return parse_budget(other.budget).total_bytes or 0

    peak = plan.predicted_peak_bytes

    def proven(way: list[Plan]) -> float:
        there = [p.lower_bound_seconds for p in way if budget(p) >= peak]
        return max(there, default=min(p.lower_bound_seconds for p in way))

    return min(map(proven, ways))


def _fastest_within(plans: list[Plan], points: int) -> list[Plan]:
    """At budgets evenly apart the fastest plan within it, the largest budget first."""
    ranked = sorted(plans, key=lambda p: (p.predicted_seconds, p.predicted_step_peak_bytes))
    peaks = [plan.predicted_step_peak_bytes for plan in plans]
    high, low = max(peaks), min(peaks)
    budgets = (high - (high - low) * i // (points - 1) for i in range(points))
    chosen = dict.fromkeys(
        next(i for i, plan in enumerate(ranked) if plan.predicted_step_peak_bytes <= budget) for budget in budgets
    )
    return [replace(p, budget=p.budget or f"{p.predicted_peak_bytes} B") for p in (ranked[i] for i in chosen)]


def _ruled(graph: StepGraph, wanted: Wanted) -> Codes:
    """What rules ask for. Places are checked before anything takes time: what is planned for a device elsewhere runs
    there."""
    ruled = codes_of_rules(graph, wanted)
    found = {code for codes in ruled.values() for code in codes if is_place(code)} | {wanted.offload}
    for place in sorted(place for place in found if place is not None and wanted.profile is None):
        check_place(place, graph.device)
    return ruled


def _ways(pricer: _Pricer, bare: Priced, ruled: Codes) -> Iterator[Priced]:
    """The step with all that may be encoded, then with less; what rules ask for always."""
    wanted = pricer.wanted
    coded = pricer.coded(ruled)
    timed = with_time(ruled, coded.graph, coded.costs)
    if timed != ruled:  # with time for what travels, and without
        yield pricer.coded(timed)
    if ruled or any(op.lazy for region in coded.graph.regions for op in region.ops):
        yield coded
    if not asks_for_codes(wanted.policy):
        yield bare
    yield from _allowed_ways(pricer, bare, timed)


def _allowed_ways(pricer: _Pricer, bare: Priced, ruled: Codes) -> Iterator[Priced]:
    """Beside what rules ask for, what may pay of the code and the place that the user allows."""
    wanted = pricer.wanted

    def priced(codes: Codes) -> Priced:
        return pricer.coded(together(ruled, codes))

    allowed = [*(EXACT if pricer.exact else ()), wanted.lossy, wanted.offload]
    every = [(code, every_code(bare.graph, wanted, code)) for code in allowed if code is not None]
    full = [(code, codes, priced(codes)) for code, codes in every if codes]
    found: list[tuple[float, int, Priced]] = []
    for some in [*([item] for item in full), *([full] if len(full) > 1 else [])]:
        for codes in worthwhile([(code, all_, p.graph, p.costs) for code, all_, p in some], bare.graph):
            way = priced(codes)
            found.append((_roughly(way, wanted), len(found), way))
    for _, _, way in sorted(found)[:_TRIED]:
        yield way


def _smallest(pricer: _Pricer, bare: Priced, ruled: Codes, refused: BudgetTooSmall) -> tuple[Plan, bool]:
    """With all that may be encoded, also where it takes more time than making it again: what else is refused fits so.

    Raises:
        BudgetTooSmall: it does not; of both refusals that which needs less.
    """
    wanted = pricer.wanted
    every = [every_code(bare.graph, wanted, code) for code in (wanted.lossy, wanted.offload) if code is not None]
    ways = [pricer.coded(together(ruled, codes)) for codes in every if codes]
    if not ways:
        raise refused
    try:
        return _fastest(ways, wanted)
    except BudgetTooSmall as error:
        raise min(refused, error, key=lambda e: e.minimum_bytes) from None


def _roughly(priced: Priced, wanted: Wanted) -> float:
    """The step time of a plan without a solver; infinite where that finds none."""
    try:
        return plan_priced(priced, replace(wanted, effort=Effort.of("quick"), progress=None)).predicted_seconds
    except BudgetTooSmall:
        return float("inf")


def _fastest(ways: Iterable[Priced], wanted: Wanted) -> tuple[Plan, bool]:
    """The plan that takes the least time, and whether no search was interrupted. Where none fits, the error of the one
    that needs least."""
    best: Plan | None = None
    whole = True
    refused: list[BudgetTooSmall] = []
    for priced in ways:
        try:
            plan = plan_priced(priced, wanted)
        except BudgetTooSmall as error:
            refused.append(error)
            continue
        whole = whole and "interrupted" not in plan.solver
        if best is None or plan.predicted_seconds < best.predicted_seconds:
            best = plan
        if best.predicted_seconds <= (1 + _NO_GAIN) * best.plain_seconds:
            break
    if best is None:
        raise min(refused, key=lambda error: error.minimum_bytes)
    return best, whole


def plan_priced(priced: Priced, wanted: Wanted) -> Plan:
    wanted.say("plan", 0, 1)
    result = make_plan(
        priced.graph,
        priced.costs,
        step_budget=_step_budget(priced, wanted),
        budget="" if wanted.budget is None else str(wanted.budget),
        policy=wanted.policy,
        kind=Plan,
        effort=wanted.effort,
        known_ops=aten_names() if wanted.policy.rules else (),
        recompute="recompute" in wanted.actions,
    )
    wanted.say("plan", 1, 1)
    assert isinstance(result, Plan)
    return result


def plan_alone(graph: StepGraph, wanted: Wanted) -> RegionSchedule:
    """Plan a single graph without its step."""
    return plan_priced(price(graph, wanted), wanted).schedule.regions[0]


def _stores_all(priced: Priced, wanted: Wanted) -> bool:
    """Whether there is no limit, or everything fits in it."""
    budget = _step_budget(priced, wanted)
    return budget is None or store_all_peak(priced.graph, priced.costs) <= budget


def _with_room(graph: StepGraph, costs: CostTable) -> StepGraph:
    """Room for what fused kernels outside of any graph really take, where autograd shows less."""
    more = sum(max(0, costs.costs[text].working_bytes - kept) for text, kept in graph.outside_calls)
    return replace(graph, outside_bytes=graph.outside_bytes + more, outside_calls=()) if graph.outside_calls else graph


def _signatures(graph: StepGraph) -> list[str]:
    found: dict[str, None] = dict.fromkeys(text for text, _ in graph.outside_calls)
    for region in graph.regions:
        for op in region.ops:
            if not op.view:
                found[op.signature] = None
            if op.rerun is not None:
                found[op.rerun.signature] = None
            if op.plain is not None:
                found[op.plain.signature] = None
    return list(found)


def _step_budget(priced: Priced, wanted: Wanted) -> int | None:
    """The bytes that a plan of the step may take, above what is resident."""
    allowed = _allowed(priced, wanted)
    return None if allowed is None else allowed - wanted.margin


def _allowed(priced: Priced, wanted: Wanted) -> int | None:
    """The budget as bytes for the step, above what is resident."""
    graph, costs, budget, profile = priced.graph, priced.costs, wanted.budget, wanted.profile
    if budget is None:
        return None
    if budget.percent is not None:
        return int(budget.percent / 100 * plain_step_peak(graph, costs))
    if budget.auto:
        free = free_bytes(graph.device) if profile is None else profile.memory - graph.resident.total
        return int((1 - _HEADROOM) * free)
    assert budget.total_bytes is not None
    left = budget.total_bytes - graph.resident.total
    if left <= 0:
        needed = graph.resident.total + max(smallest_peak(graph, costs)[0], optimizer_peak(graph, costs))
        raise BudgetTooSmall(
            f"the budget of {format_bytes(budget.total_bytes)} is less than what is resident before the step "
            f"starts: {format_bytes(graph.resident.total)} of parameters, buffers, gradients, optimizer state "
            f"and batch. The smallest budget is {needed} bytes ({format_bytes(needed)}). Give at least that, or use a "
            "smaller model or batch.",
            budget_bytes=budget.total_bytes,
            minimum_bytes=needed,
        )
    return left


def share_of(budget: Budget, plan: Plan) -> Budget:
    """What the budget is of a planned step's plain need, as a percentage for a step of which nothing is known yet."""
    if budget.percent is not None:
        return budget
    allowed = _step_budget(Priced(plan.graph, plan.costs), Wanted(budget)) or 0
    return Budget(percent=min(100.0, max(1.0, 100 * allowed / max(1, plan.plain_step_peak_bytes))))


def free_bytes(device: str) -> int:
    """Memory that is free on the device now, in bytes."""
    if device == "cuda":
        free, _total = torch.cuda.mem_get_info()
        return int(free) + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise GradstowError('the free memory of this machine cannot be read, so budget="auto" is unknown. Give bytes.')


def _check_training(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    if not model.training:
        raise CaptureError(
            f"{type(model).__name__} is in eval mode, in which a stowed model runs as plain PyTorch. "
            "Call model.train() before planning."
        )
    if optimizer is None:
        return
    own = {id(p) for p in model.parameters()}
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise CaptureError(
            f"none of the optimizer's parameters belongs to {type(model).__name__}. Pass the optimizer that trains it: "
            "torch.optim.AdamW(model.parameters(), ...)."
        )


def check_devices(model: torch.nn.Module, batch: Any) -> None:
    device = device_of(model)
    for item in tensors(batch):
        if item.device.type != device and item.dim() > 0:
            raise CaptureError(
                f"the batch holds a tensor of shape {tuple(item.shape)} on {item.device.type}, and "
                f"{type(model).__name__} is on {device}. Move the batch: tensor.to({device!r})."
            )
