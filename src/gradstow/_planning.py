"""capture → cost → plan: what is known of a step becomes a Plan."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from gradstow._errors import BudgetTooSmall, CaptureError, GradstowError, PolicyError
from gradstow._plan import Plan
from gradstow._units import Budget, format_bytes
from gradstow.actions import LOSSLESS
from gradstow.capture import Captured, RehearsalFailed, Step, aten_names, capture, device_of, tensors
from gradstow.cost import Profile, analytic_costs, measured_costs
from gradstow.ir import CostTable, StepGraph
from gradstow.planner import Effort, Policy, make_plan, plain_step_peak, smallest_peak, store_all_peak

Progress = Callable[[str, int, int], None]
PolicyLike = str | Mapping[str, str] | Policy

ACTIONS = ("store", "recompute", "compress")
_TIMING_LIMIT = 1 << 30  # bytes that timing one op may take where the budget does not say less
_HEADROOM = 0.1  # share of the free memory that "auto" leaves alone


def plan_step(
    model: torch.nn.Module,
    step: Step,
    budget: Budget | None,
    policy: PolicyLike,
    progress: Progress | None = None,
    effort: str | Effort = "normal",
    profile: Profile | None = None,
    actions: Sequence[str] = ACTIONS,
) -> Plan:
    """Capture, price and plan one step. Allocates at most one op at a time."""
    Policy.of(policy), Effort.of(effort)  # before anything takes time
    check_actions(actions)
    return plan_captured(capture_step(model, step, progress), budget, policy, progress, effort, profile, actions)


def capture_step(model: torch.nn.Module, step: Step, progress: Progress | None = None) -> Captured:
    """Rehearse a step that can be planned."""
    say = progress or _silent
    check_devices(model, (step.inputs, step.batch))
    _check_training(model, step.optimizer)
    say("rehearse", 0, 1)
    captured = capture(model, step)
    say("rehearse", 1, 1)
    return captured


def check_actions(actions: Sequence[str]) -> None:
    """Refuse what names no action.

    Raises:
        PolicyError: with those that there are.
    """
    wrong = [str(name) for name in ([actions] if isinstance(actions, str) else actions) if name not in ACTIONS]
    if wrong or isinstance(actions, str) or "store" not in actions:
        what = f"{wrong[0]!r} is no action" if wrong else f"actions={actions!r} leaves out storing, or is no list"
        raise PolicyError(f"{what}. Give some of {ACTIONS}, 'store' among them.")


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


def price(
    graph: StepGraph,
    limit: int = _TIMING_LIMIT,
    progress: Progress | None = None,
    profile: Profile | None = None,
) -> CostTable:
    """The price of every op: by a profile, or measured where the cache does not know it.

    What needs more than ``limit`` bytes is measured smaller.
    """
    if profile is not None:
        return analytic_costs(_signatures(graph), profile)
    say = progress or _silent
    return measured_costs(_signatures(graph), graph.device, limit, lambda done, total: say("time ops", done, total))


def plan_captured(
    captured: Captured,
    budget: Budget | None,
    policy: PolicyLike,
    progress: Progress | None = None,
    effort: str | Effort = "normal",
    profile: Profile | None = None,
    actions: Sequence[str] = ACTIONS,
) -> Plan:
    """Price and plan a step that is captured.

    Compression is tried only where storing everything does not fit, so that a large budget costs nothing.
    """
    graph = captured.graph()
    if budget is not None and "compress" in actions and Policy.of(policy).name == "auto":
        costs = price(graph, _timing_limit(budget), progress, profile)
        room = with_room(graph, costs)
        if store_all_peak(room, costs) > (_step_budget(room, costs, budget, profile) or 0):
            graph = captured.graph(LOSSLESS)
    return plan_graph(graph, budget, policy, progress, effort, profile, actions)


def plan_graph(
    graph: StepGraph,
    budget: Budget | None,
    policy: PolicyLike,
    progress: Progress | None = None,
    effort: str | Effort = "normal",
    profile: Profile | None = None,
    actions: Sequence[str] = ACTIONS,
) -> Plan:
    """Price and plan one graph."""
    say = progress or _silent
    costs = price(graph, _timing_limit(budget), progress, profile)
    graph = with_room(graph, costs)
    say("plan", 0, 1)
    result = make_plan(
        graph,
        costs,
        step_budget=_step_budget(graph, costs, budget, profile),
        budget="" if budget is None else str(budget),
        policy=policy,
        kind=Plan,
        effort=effort,
        known_ops=aten_names() if Policy.of(policy).rules else (),
        recompute="recompute" in actions,
    )
    say("plan", 1, 1)
    assert isinstance(result, Plan)
    return result


def _timing_limit(budget: Budget | None) -> int:
    """Bytes that timing one op may take."""
    given = None if budget is None else budget.total_bytes
    return _TIMING_LIMIT if given is None else min(_TIMING_LIMIT, given)


def with_room(graph: StepGraph, costs: CostTable) -> StepGraph:
    """Room for what fused kernels outside of any graph really take, where autograd shows less."""
    more = sum(max(0, costs.costs[text].working_bytes - kept) for text, kept in graph.outside_calls)
    return replace(graph, outside_bytes=graph.outside_bytes + more, outside_calls=()) if graph.outside_calls else graph


def _silent(_stage: str, _done: int, _total: int) -> None:
    pass


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


def _step_budget(graph: StepGraph, costs: CostTable, budget: Budget | None, profile: Profile | None) -> int | None:
    """The budget as bytes for the step, above what is resident."""
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
        needed = graph.resident.total + smallest_peak(graph, costs)[0]
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
    allowed = _step_budget(plan.graph, plan.costs, budget, None) or 0
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
