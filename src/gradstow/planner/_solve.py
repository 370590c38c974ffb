"""StepGraph × CostTable × budget × policy → PlanData, replayed before it is handed out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gradstow._errors import BudgetTooSmall
from gradstow._units import format_bytes
from gradstow.ir import CostTable, PlanData, Schedule, StepGraph, check_schedule, just_in_time, replay
from gradstow.planner._evaluate import Outcome, evaluate
from gradstow.planner._knapsack import Knapsack
from gradstow.planner._local import improve, is_small
from gradstow.planner._policies import check_policy, kept_by_policy
from gradstow.planner._problem import Problem, build_problem
from gradstow.planner._search import minimum, search

_ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class Decision:
    """What a solver found: kept storages by region, and how."""

    kept: list[set[int]]
    bound: float
    solver: dict[str, object]


def make_plan(
    graph: StepGraph,
    costs: CostTable,
    *,
    step_budget: int | None,
    budget: str,
    policy: str = "auto",
    kind: Callable[..., PlanData] = PlanData,
) -> PlanData:
    """The cheapest plan whose replayed step peak is at or under ``step_budget`` bytes.

    ``step_budget`` None asks for the policy's plan whatever it needs. ``kind`` is the class to return.

    Raises:
        BudgetTooSmall: no plan fits; the error names the smallest budget that can be met and what sets it.
        PolicyError: the policy does not exist.
    """
    check_policy(policy)
    problem = build_problem(graph, costs)
    everything = kept_by_policy(problem, "store-all")
    plain = _schedule(graph, problem, everything, reuse=False)
    decision = _decide(graph, costs, problem, step_budget, policy)
    schedule = _events(graph, decision.kept, reuse=True)
    check_schedule(graph, schedule)
    plan = kind(
        graph=graph,
        schedule=schedule,
        plain=plain,
        costs=costs,
        budget=budget,
        policy=policy,
        lower_bound_seconds=replay(graph, plain, costs, plain=True).seconds + decision.bound,
        solver=decision.solver,
    )
    if step_budget is not None:
        _refuse_if_over(plan, problem, step_budget)
    return plan


def plain_step_peak(graph: StepGraph, costs: CostTable) -> int:
    """Simulated step peak of plain PyTorch, in bytes."""
    problem = build_problem(graph, costs)
    schedule = _schedule(graph, problem, kept_by_policy(problem, "store-all"), reuse=False)
    return replay(graph, schedule, costs, plain=True).peak_bytes


def _decide(graph: StepGraph, costs: CostTable, problem: Problem, step_budget: int | None, policy: str) -> Decision:
    if policy != "auto" or step_budget is None:
        name = "store-all" if policy == "auto" else policy
        return Decision(_by_region(problem, kept_by_policy(problem, name)), 0.0, {"solver": name})
    everything = evaluate(problem, kept_by_policy(problem, "store-all"))
    kept = _by_region(problem, everything.kept)
    if replay(graph, _events(graph, kept, reuse=True), costs).peak_bytes <= step_budget:
        return Decision(kept, 0.0, {"solver": "store-all"})
    knapsack = Knapsack(problem)
    bound, target = 0.0, step_budget
    for attempt in range(_ATTEMPTS):
        found = search(problem, knapsack, target)
        bound = bound if attempt else found.bound  # later attempts aim lower: their bounds prove nothing here
        if found.outcome is None:
            target -= step_budget // 33  # near the minimum, aiming lower sometimes lands where aiming well did not
            continue
        outcome = improve(problem, found.outcome, target) if is_small(problem) else found.outcome
        kept = _by_region(problem, outcome.kept)
        over = replay(graph, _events(graph, kept, reuse=True), costs).peak_bytes - step_budget
        if over <= 0:
            notes: dict[str, object] = {"solver": "knapsack", "rounds": found.rounds, "attempts": attempt + 1}
            return Decision(kept, bound, notes)
        target -= over  # the replay is the last word: aim lower by what it found
    return _least(graph, costs, problem, knapsack, step_budget, everything, bound)


def _least(
    graph: StepGraph,
    costs: CostTable,
    problem: Problem,
    knapsack: Knapsack,
    step_budget: int,
    everything: Outcome,
    bound: float,
) -> Decision:
    """The plan of the lowest peak, where the knapsack found none that fits; refuses where that is too high."""
    best = minimum(problem, knapsack, everything)
    for outcome in (improve(problem, best, step_budget), best):
        kept = _by_region(problem, outcome.kept)
        peak = replay(graph, _events(graph, kept, reuse=True), costs).peak_bytes
        if peak <= step_budget:
            return Decision(kept, bound, {"solver": "local search"})
    needed = peak + graph.resident.total
    raise BudgetTooSmall(
        f"no plan fits: the budget leaves {format_bytes(step_budget)} for the step above the "
        f"{format_bytes(graph.resident.total)} that are resident, and the smallest step peak found is "
        f"{format_bytes(peak)}, set by {_culprit(problem, best)}. The smallest budget is "
        f"{needed} bytes ({format_bytes(needed)}). Give at least that, or use a smaller batch.",
        budget_bytes=step_budget + graph.resident.total,
        minimum_bytes=needed,
    )


def _refuse_if_over(plan: PlanData, problem: Problem, step_budget: int) -> None:
    """A named policy, or optimizer.step, may need more than the budget."""
    resident, needed = plan.resident_bytes, plan.predicted_peak_bytes
    if needed <= step_budget + resident:
        return
    optimizer = plan.optimizer_bytes > plan.timeline.peak_bytes
    what = "optimizer.step" if optimizer else f"the policy {plan.policy!r}"
    raise BudgetTooSmall(
        f"{what} needs {format_bytes(needed)} ({format_bytes(resident)} of it resident), "
        f"and the budget is {format_bytes(step_budget + resident)}. "
        + ("Use foreach=False or a larger budget." if optimizer else "Use policy='auto' or a larger budget."),
        budget_bytes=step_budget + resident,
        minimum_bytes=needed,
    )


def _culprit(problem: Problem, outcome: Outcome) -> str:
    """The op and the largest value alive at the peak, in words."""
    start = len(outcome.during) - len(outcome.backward)
    index = outcome.peak_at
    if index >= start:
        node = outcome.backward[index - start][0]
    elif index < len(problem.forward):
        node = problem.forward[index]
    else:
        return "the room reserved for the loss"
    op = problem.graph.regions[node.region].ops[node.op]
    touched = (*node.inputs, *node.outputs)
    largest = max(touched, key=lambda s: problem.nbytes[s], default=None)
    value = ""
    if largest is not None:
        r, storage = problem.names[largest]
        region = problem.graph.regions[r]
        name = next(v.name for v in region.values if v.storage == storage)
        value = f", with {name} of {format_bytes(problem.nbytes[largest])}"
    place = f" in {op.module}" if op.module else ""
    return f"{op.target}{place} ({op.source or 'no source line'}){value}"


def _by_region(problem: Problem, kept: set[int]) -> list[set[int]]:
    """Kept storages as region-local ids; a boundary storage is kept by every region that reads it."""
    result: list[set[int]] = [set() for _ in problem.graph.regions]
    for number in kept | problem.held:  # what the caller holds is kept without cost
        r, storage = problem.names[number]
        result[r].add(storage)
    for r, region in enumerate(problem.graph.regions):
        result[r].update(s for s, item in enumerate(region.storages) if item.origin is not None)
    return result


def _events(graph: StepGraph, kept: list[set[int]], *, reuse: bool) -> Schedule:
    everything = [k if r.managed else set(range(len(r.storages))) for r, k in zip(graph.regions, kept, strict=True)]
    return Schedule(tuple(just_in_time(r, k, reuse=reuse) for r, k in zip(graph.regions, everything, strict=True)))


def _schedule(graph: StepGraph, problem: Problem, kept: set[int], *, reuse: bool) -> Schedule:
    return _events(graph, _by_region(problem, kept), reuse=reuse)
