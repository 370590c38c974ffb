"""Find what to keep for a budget: solve the knapsack, follow the result, add the moments that overflow."""

from __future__ import annotations

from dataclasses import dataclass

from gradstow.planner._evaluate import Outcome, evaluate
from gradstow.planner._knapsack import Knapsack
from gradstow.planner._local import improve
from gradstow.planner._problem import Problem

_ROUNDS = 10
_MOMENTS_PER_ROUND = 4


@dataclass(slots=True)
class Found:
    """A kept set that fits, or the best attempt. ``bound`` is the proven lower bound on added seconds."""

    outcome: Outcome | None
    bound: float
    rounds: int


def search(problem: Problem, knapsack: Knapsack, budget: int, *, seconds: float = 4.0, gap: float = 0.005) -> Found:
    """The cheapest kept set whose followed peak is at or under ``budget`` step bytes; ``outcome`` None if none."""
    moments: dict[int, int] = {}
    bound = 0.0
    for rounds in range(1, _ROUNDS + 1):
        solution = knapsack.solve(budget, moments, seconds=seconds, gap=gap)
        if rounds == 1:
            bound = solution.bound  # only the start of the backward: holds for every order of reruns
        if solution.kept is None:
            return Found(None, bound, rounds)
        outcome = evaluate(problem, solution.kept)
        if outcome.peak_bytes <= budget:
            return Found(outcome, bound, rounds)
        _add_overflows(problem, outcome, budget, moments)
    return Found(None, bound, _ROUNDS)


def _add_overflows(problem: Problem, outcome: Outcome, budget: int, moments: dict[int, int]) -> None:
    """Constrain the worst moments over budget; one that is constrained already must leave more room."""
    forwards = len(problem.forward)
    start = len(outcome.during) - len(outcome.backward)
    over: dict[int, int] = {}
    ops_before = 0
    for index, nbytes in enumerate(outcome.during):
        if index < forwards:
            moment = -1 - index
        elif index < start:
            continue  # the reserve for the loss: the start of the backward covers it
        else:
            moment = ops_before
            ops_before += not outcome.backward[index - start][1]
        if nbytes > budget:
            over[moment] = max(over.get(moment, 0), nbytes - budget)
    chosen: list[int] = []
    for moment in sorted(over, key=over.__getitem__, reverse=True):
        if len(chosen) == _MOMENTS_PER_ROUND:
            break
        if moment in moments or all(abs(moment - other) > 3 for other in chosen):
            chosen.append(moment)
    for moment in chosen:
        moments[moment] = moments[moment] + over[moment] if moment in moments else 0


def minimum(problem: Problem, knapsack: Knapsack, everything: Outcome) -> Outcome:
    """The outcome with the lowest peak that is found, whatever it costs in time.

    It does not depend on the budget that was asked for: a budget at this peak or above it can always be met.
    """
    best, low, high = everything, max(knapsack.fixed, default=0), everything.peak_bytes
    while high - low > max(high // 50, 1 << 16):
        middle = (low + high) // 2
        outcome = search(problem, knapsack, middle, seconds=1.5, gap=0.1).outcome
        if outcome is None:
            low = middle
        else:
            best, high = outcome, min(middle, outcome.peak_bytes)
    return improve(problem, best, 0)
