"""What follows the just-in-time rule itself: every kept set of a small problem, local search in a large one.

The knapsack's moments inside the backward are a model of that rule and no more. The work is counted in
evaluations, so that the result does not depend on the machine.
"""

from __future__ import annotations

from itertools import compress, product

from gradstow.planner._evaluate import Outcome, evaluate
from gradstow.planner._problem import Problem

_SMALL = 9  # decisions: 512 evaluations


def improve(problem: Problem, start: Outcome, budget: int, *, work: int = 400) -> Outcome:
    """The best outcome found from ``start``: fewest bytes over ``budget``, then seconds, then peak.

    A small problem is searched through; in a large one a storage is kept or dropped for as long as that
    helps, with at most ``work`` evaluations. The result is never worse than ``start``.
    """
    groups = _groups(problem)
    if len(groups) > _SMALL:
        return _climb(problem, groups, start, budget, work)
    choices = product((False, True), repeat=len(groups))
    outcomes = [evaluate(problem, set().union(*compress(groups, choice))) for choice in choices]
    return min((start, *outcomes), key=lambda outcome: _score(outcome, budget))


def is_small(problem: Problem) -> bool:
    """Whether ``improve`` searches the problem through."""
    return len(_groups(problem)) <= _SMALL


def _score(outcome: Outcome, budget: int) -> tuple[int, float, int]:
    return max(outcome.peak_bytes - budget, 0), round(outcome.seconds, 12), outcome.peak_bytes


def _groups(problem: Problem) -> list[set[int]]:
    """Storages that can be kept or made again, by decision."""
    read = {s for node in problem.backward for s in node.inputs}
    read.update(s for node in problem.forward for s in node.again_inputs)
    fixed = problem.always | problem.held | problem.boundary
    groups: dict[int, set[int]] = {}
    for s in sorted(problem.keepable & read - fixed):
        node = problem.forward[problem.maker[s]]
        if not node.pinned and s in node.again_outputs:
            groups.setdefault(problem.decision[s], set()).add(s)
    return list(groups.values())


def _climb(problem: Problem, groups: list[set[int]], start: Outcome, budget: int, work: int) -> Outcome:
    """Take the first flip that helps, the most promising ones first, until none does."""
    best, tried = start, 0
    while tried < work:
        before = best
        for group in sorted(groups, key=lambda g: _promise(problem, g, before, budget))[: work - tried]:
            kept = before.kept | group if group.isdisjoint(before.kept) else before.kept - group
            outcome, tried = evaluate(problem, kept), tried + 1
            if _score(outcome, budget) < _score(best, budget):
                best = outcome
                break
        if best is before:
            break
    return best


def _promise(problem: Problem, group: set[int], here: Outcome, budget: int) -> tuple[bool, float]:
    """Over the budget drop what is large; else keep what is slow to make again."""
    kept = not group.isdisjoint(here.kept)
    if here.peak_bytes > budget:
        return not kept, -float(sum(problem.nbytes[s] for s in group))
    return kept, -sum(problem.forward[problem.maker[s]].again_seconds for s in group)
