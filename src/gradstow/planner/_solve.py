"""StepGraph × CostTable × budget × policy → PlanData, replayed before it is handed out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from gradstow._errors import BudgetTooSmall
from gradstow._units import format_bytes
from gradstow.ir import CostTable, PlanData, Schedule, StepGraph, check_schedule, replay, write_events
from gradstow.planner import _small
from gradstow.planner._evaluate import Order, Outcome, evaluate, expand
from gradstow.planner._minimum import Minimum, minimum
from gradstow.planner._policies import Policy, kept_by_policy
from gradstow.planner._prefetch import prefetched
from gradstow.planner._problem import Problem, build_problem
from gradstow.planner._program import Stages
from gradstow.planner._rules import apply_rules
from gradstow.planner._search import Effort, search

_AGAIN = 3  # times that a plan is decided again where the replay finds it over the budget


@dataclass(frozen=True, slots=True)
class Decision:
    """What a solver found: the backward's order, a proven bound on the added seconds, and how."""

    order: Order
    bound: float
    solver: dict[str, object]


def make_plan(
    graph: StepGraph,
    costs: CostTable,
    *,
    step_budget: int | None,
    budget: str,
    policy: str | Mapping[str, str] | Policy = "auto",
    kind: Callable[..., PlanData] = PlanData,
    effort: str | Effort = "normal",
    known_ops: Collection[str] = (),
    recompute: bool = True,
) -> PlanData:
    """The cheapest plan whose replayed step peak is at or under ``step_budget`` bytes.

    ``step_budget`` None asks for the policy's plan whatever it needs. ``kind`` is the class to return;
    ``known_ops`` are names that rules may hold though the graph has no such op. Without ``recompute`` only what
    was encoded is made again.

    Raises:
        BudgetTooSmall: no plan fits; the error names the smallest budget that can be met and what sets it.
        PolicyError: the policy or a name in its rules does not exist.
    """
    wanted = Policy.of(policy)
    problem, plain, notes = restricted(graph, costs, wanted, known_ops, recompute)
    decision = _decide_replayed(problem, step_budget, wanted.name, Effort.of(effort))
    order = prefetched(problem, decision.order, step_budget)
    schedule = schedule_of(problem, order)
    check_schedule(graph, schedule)
    plan = kind(
        graph=graph,
        schedule=schedule,
        plain=plain,
        costs=costs,
        budget=budget,
        policy=str(wanted),
        lower_bound_seconds=base_seconds(problem) + decision.bound,
        solver={**decision.solver, **({"rules": notes} if notes else {})},
    )
    if step_budget is not None:
        _refuse_if_over(plan, step_budget)
    return plan


def restricted(
    graph: StepGraph, costs: CostTable, wanted: Policy, known_ops: Collection[str], recompute: bool
) -> tuple[Problem, Schedule, list[str]]:
    """The problem that rules and a ban on recomputation leave, plain PyTorch's schedule, what each rule came to."""
    problem = build_problem(graph, costs)
    plain = plain_schedule(problem)
    if not recompute:
        problem.remaker = {s: node for s, node in problem.remaker.items() if node.lazy or node.decodes}
    return problem, plain, apply_rules(problem, wanted.rules, known_ops)


def smallest_peak(graph: StepGraph, costs: CostTable, effort: Effort | None = None) -> tuple[int, int]:
    """(smallest step peak that make_plan reaches, highest that no schedule is proven to be under), in bytes."""
    problem = build_problem(graph, costs)
    found = minimum(problem, Stages(problem), effort or Effort())
    return replay(graph, schedule_of(problem, found.outcome.order), costs).peak_bytes, found.proven_bytes


def optimizer_peak(graph: StepGraph, costs: CostTable) -> int:
    """Bytes alive while ``optimizer.step`` runs, above what is resident, whatever the schedule; 0 without one."""
    if not graph.optimizer_peak_bytes:
        return 0
    end = replay(graph, schedule_of(build_problem(graph, costs), []), costs).end_bytes
    return end + graph.optimizer_peak_bytes


def base_seconds(problem: Problem) -> float:
    """What every order of this graph takes at least: each op once, without what need not run."""
    return sum(node.seconds for node in (*problem.forward, *problem.backward) if not node.lazy)


def store_all_peak(graph: StepGraph, costs: CostTable) -> int:
    """Step peak where everything that the backward needs is kept, in bytes."""
    problem = build_problem(graph, costs)
    return evaluate(problem, expand(problem, kept_by_policy(problem, "store-all"))).peak_bytes


def plain_step_peak(graph: StepGraph, costs: CostTable) -> int:
    """Simulated step peak of plain PyTorch, in bytes."""
    return replay(graph, plain_schedule(build_problem(graph, costs)), costs, plain=True).peak_bytes


def plain_schedule(problem: Problem) -> Schedule:
    """Everything stored, nothing written over, gradients handed over at once."""
    return schedule_of(problem, [], plain=True)


def schedule_of(problem: Problem, order: Order, *, reuse: bool = True, plain: bool = False) -> Schedule:
    """The order as events, region by region."""
    reruns: list[dict[int, list[int]]] = [{} for _ in problem.graph.regions]
    waiting: list[int] = []
    for node, again in order:
        if again:
            waiting.append(node.op)
        elif waiting:
            reruns[node.region][node.op] = waiting
            waiting = []
    fixed: list[set[int]] = [set() for _ in problem.graph.regions]
    for number in problem.fixed:
        r, storage = problem.names[number]
        fixed[r].add(storage)
    return Schedule(
        tuple(
            write_events(region, reruns[r], fixed=fixed[r], reuse=reuse, plain=plain)
            for r, region in enumerate(problem.graph.regions)
        )
    )


def _decide_replayed(problem: Problem, step_budget: int | None, policy: str, effort: Effort) -> Decision:
    """The replay has the last word: what it finds over the budget is decided again for that much less."""
    decision = _decide(problem, step_budget, policy, effort)
    if step_budget is None or policy != "auto":
        return decision
    target = step_budget
    for _ in range(_AGAIN):
        over = _replayed_peak(problem, decision.order) - step_budget
        if over <= 0:
            return decision
        target -= over
        cut_short = {"interrupted": True} if "interrupted" in decision.solver else {}
        try:
            again = _decide(problem, target, policy, effort)
            decision = replace(again, solver={**again.solver, **cut_short})
        except BudgetTooSmall:
            least = minimum(problem, Stages(problem), effort)
            if _replayed_peak(problem, least.outcome.order) > step_budget:
                raise _too_small(problem, least, step_budget) from None
            return Decision(least.outcome.order, 0.0, {"solver": "smallest peak", **cut_short})
    return decision


def _replayed_peak(problem: Problem, order: Order) -> int:
    return replay(problem.graph, schedule_of(problem, order), problem.costs).peak_bytes


def _decide(problem: Problem, step_budget: int | None, policy: str, effort: Effort) -> Decision:
    if policy != "auto" or step_budget is None:
        name = "store-all" if policy == "auto" else policy
        return Decision(expand(problem, kept_by_policy(problem, name)), 0.0, {"solver": name})
    everything = evaluate(problem, expand(problem, kept_by_policy(problem, "store-all")))
    if everything.peak_bytes <= step_budget:
        return Decision(everything.order, 0.0, {"solver": "store-all"})
    stages = Stages(problem)
    found = search(problem, stages, step_budget, effort)
    cut_short: dict[str, object] = {"interrupted": True} if found.interrupted else {}
    small = _small.best(problem, step_budget)
    if small is not None and (found.outcome is None or small.seconds < found.outcome.seconds):
        return Decision(small.order, found.bound, {"solver": "all orders", **cut_short})
    if found.outcome is not None:
        name = "stages" if effort.rounds else "greedy"
        notes: dict[str, object] = {"solver": name, "rounds": found.rounds, "moments": len(found.moments)}
        return Decision(found.outcome.order, found.bound, {**notes, **cut_short})
    least = minimum(problem, stages, effort)
    if least.outcome.peak_bytes <= step_budget:
        return Decision(least.outcome.order, found.bound, {"solver": "smallest peak"})
    raise _too_small(problem, least, step_budget)


def _too_small(problem: Problem, least: Minimum, step_budget: int) -> BudgetTooSmall:
    graph, peak = problem.graph, max(least.outcome.peak_bytes, _replayed_peak(problem, least.outcome.order))
    optimizer = optimizer_peak(graph, problem.costs)
    needed = max(peak, optimizer) + graph.resident.total
    schedule = "schedule with these codes" if problem.lazy else "schedule"  # others keep other values
    step = f", of which optimizer.step needs {format_bytes(optimizer)}" if optimizer > peak else ""
    return BudgetTooSmall(
        f"no plan fits: the budget leaves {format_bytes(step_budget)} for the step above the "
        f"{format_bytes(graph.resident.total)} that are resident, and the smallest step peak found is "
        f"{format_bytes(peak)}, set by {_culprit(problem, least.outcome)}; under {format_bytes(least.proven_bytes)} "
        f"no {schedule} can be. The smallest budget is {needed} bytes ({format_bytes(needed)}){step}. Give at least "
        "that, or use a smaller batch.",
        budget_bytes=step_budget + graph.resident.total,
        minimum_bytes=needed,
    )


def _refuse_if_over(plan: PlanData, step_budget: int) -> None:
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
    index = outcome.peak_at
    if index < 0:
        return "code outside of any graph"
    if index >= outcome.start:
        node = outcome.order[index - outcome.start][0]
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
