"""Local search: keep or drop one storage at a time, on small problems two, for as long as that helps.

Where the knapsack stops, for its moments inside the backward are a model of the just-in-time rule and no
more, this follows the rule itself. The work is counted in evaluations, so that the result does not depend
on the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from gradstow.planner._evaluate import Outcome, evaluate
from gradstow.planner._problem import Problem

_SMALL = 12  # decisions
_Score = tuple[int, float, int]


def improve(problem: Problem, start: Outcome, budget: int, *, work: int = 400) -> Outcome:
    """The best outcome found from ``start``: fewest bytes over ``budget``, then seconds, then peak.

    ``work`` bounds the evaluations. The result is never worse than ``start``.
    """
    groups = _groups(problem)
    best = start
    while work > 0:
        found = best
        for move in _moves(problem, groups, best, budget):
            kept = set(best.kept)
            for group in move:
                kept.symmetric_difference_update(group)
            outcome, work = evaluate(problem, kept), work - 1
            if _score(outcome, budget) < _score(best, budget):
                found = outcome
                break
            if work <= 0:
                break
        if found is best:
            break
        best = found
    return best


def polish(problem: Problem, starts: list[Outcome], budget: int) -> Outcome:
    """On small problems the best that is found from any start or from keeping nothing; else the first start."""
    if len(_groups(problem)) > _SMALL:
        return starts[0]
    found = [improve(problem, start, budget) for start in (*starts, evaluate(problem, set()))]
    return min(found, key=lambda outcome: _score(outcome, budget))


def _score(outcome: Outcome, budget: int) -> _Score:
    return max(outcome.peak_bytes - budget, 0), round(outcome.seconds, 12), outcome.peak_bytes


def _groups(problem: Problem) -> list[list[int]]:
    """Storages that can be kept or made again, by decision."""
    read = {s for node in problem.backward for s in node.inputs}
    read.update(s for node in problem.forward for s in node.again_inputs)
    fixed = problem.always | problem.held | problem.boundary
    groups: dict[int, list[int]] = {}
    for s in sorted(problem.keepable & read - fixed):
        node = problem.forward[problem.maker[s]]
        if not node.pinned and s in node.again_outputs:
            groups.setdefault(problem.decision[s], []).append(s)
    return list(groups.values())


def _moves(problem: Problem, groups: list[list[int]], here: Outcome, budget: int) -> Iterator[tuple[list[int], ...]]:
    """Flips, the most promising first: over the budget drop what is large, else keep what is slow to make again."""

    def promise(group: list[int]) -> tuple[bool, float]:
        kept = group[0] in here.kept
        if here.peak_bytes > budget:
            return not kept, -float(sum(problem.nbytes[s] for s in group))
        return kept, -sum(problem.forward[problem.maker[s]].again_seconds for s in group)

    ordered = sorted(groups, key=promise)
    yield from ((group,) for group in ordered)
    if len(groups) <= _SMALL:
        yield from combinations(ordered, 2)
