"""Time against peak, from everything stored down to the smallest peak: one effort shared by all points."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from gradstow.ir import CostTable, PlanData, StepGraph
from gradstow.planner._evaluate import Outcome, evaluate, expand
from gradstow.planner._minimum import minimum
from gradstow.planner._moves import improve
from gradstow.planner._policies import Policy, kept_by_policy
from gradstow.planner._problem import Problem
from gradstow.planner._program import Stages
from gradstow.planner._search import Effort, search, settle
from gradstow.planner._solve import base_seconds, restricted, schedule_of

_CARRIED = 12  # moments that one point hands to the next


@dataclass(frozen=True, slots=True)
class _Point:
    budget: int
    outcome: Outcome
    bound: float


def frontier(
    graph: StepGraph,
    costs: CostTable,
    *,
    points: int,
    kind: Callable[..., PlanData] = PlanData,
    policy: Policy | None = None,
    effort: Effort | None = None,
    known_ops: Collection[str] = (),
    recompute: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[PlanData], int]:
    """Plans at ``points`` budgets, from the highest to the smallest that can be met, evenly apart in bytes.

    Each plan's peak is at or under its budget; less budget never takes less time. Second comes the highest
    step peak that no schedule is proven to be under. Of ``policy`` the rules hold; ``known_ops`` and ``recompute`` are
    as for ``make_plan``.
    """
    rules = policy or Policy()
    problem, plain, notes = restricted(graph, costs, rules, known_ops, recompute)
    stages, effort = Stages(problem), effort or Effort()
    everything = evaluate(problem, expand(problem, kept_by_policy(problem, "store-all")))
    least = minimum(problem, stages, effort)
    budgets = _budgets(everything.peak_bytes, least.outcome.peak_bytes, points)
    found: list[_Point] = [_Point(budgets[0], everything, 0.0)]
    moments: frozenset[int] = frozenset()
    for number, budget in enumerate(budgets[1:], 1):
        if progress is not None:
            progress(number, len(budgets))
        point, moments = _next(problem, stages, budget, found[-1], least.outcome, effort, moments)
        found.append(point)
    found = _monotone(problem, found, effort)
    if progress is not None:
        progress(len(budgets), len(budgets))
    solver: dict[str, object] = {"solver": "frontier", **({"rules": notes} if notes else {})}
    plans = [
        kind(
            graph=graph,
            schedule=schedule_of(problem, point.outcome.order),
            plain=plain,
            costs=costs,
            budget=f"{point.budget + graph.resident.total} B",
            policy=str(rules),
            lower_bound_seconds=base_seconds(problem) + point.bound,
            solver=solver,
        )
        for point in found
    ]
    return plans, least.proven_bytes


def _budgets(high: int, low: int, points: int) -> list[int]:
    """From high to low; fewer where there is nothing between."""
    steps = max(points - 1, 1)
    return list(dict.fromkeys(high - (high - low) * i // steps for i in range(steps + 1)))


def _next(
    problem: Problem,
    stages: Stages,
    budget: int,
    above: _Point,
    least: Outcome,
    effort: Effort,
    moments: frozenset[int],
) -> tuple[_Point, frozenset[int]]:
    """The point of the next lower budget. The one above, mended, stands where the search finds none."""
    found = search(problem, stages, budget, replace(effort, rounds=(effort.rounds + 1) // 2), moments=moments)
    hint = least if budget == least.peak_bytes else None
    candidates = [found.outcome, settle(problem, above.outcome, budget, effort), hint]
    fitting = [o for o in candidates if o is not None and o.peak_bytes <= budget]
    if not fitting:
        found = search(problem, stages, budget, effort)
        fitting = [found.outcome] if found.outcome is not None else []
    best = min(fitting, key=lambda o: o.seconds, default=None)
    if best is None:  # the smallest peak fits every budget, and may use the room
        best = improve(problem, least, budget, work=effort.moves)
    carried = frozenset(found.moments) if len(found.moments) <= _CARRIED else frozenset[int]()
    return _Point(budget, best, max(found.bound, above.bound)), carried


def _monotone(problem: Problem, found: list[_Point], effort: Effort) -> list[_Point]:
    """Where a lower budget was served in less time, its plan serves the higher one too, and may use the room."""
    result: list[_Point] = []
    below: Outcome | None = None
    for point in reversed(found):
        outcome = point.outcome
        if below is not None and below.seconds <= outcome.seconds and below is not outcome:
            outcome = improve(problem, below, point.budget, work=effort.moves)
        result.append(replace(point, outcome=outcome))
        below = outcome
    return result[::-1]
