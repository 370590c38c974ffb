"""A plan without a solver, in time that grows about linearly with the graph: keep what costs most per byte.

Storages are ranked by the seconds of making them again per byte; equals are spread evenly over the step, so that
the chains between what is kept are short. As many as fit are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gradstow.planner._evaluate import Outcome, evaluate, expand
from gradstow.planner._moves import prune
from gradstow.planner._problem import Problem

_SHRINK = 0.9  # what is kept of the ranks from one try to the next
_STEP = 0.1  # worths closer than this are alike


def greedy(problem: Problem, budget: int) -> Outcome:
    """The outcome with the most kept whose peak fits ``budget``, or the one that comes nearest."""
    ranked = _ranked(problem)
    must = problem.keepable - problem.remaker.keys()
    best: Outcome | None = None
    for count in _counts(problem, ranked, budget):
        kept = must | _alike(problem, set(ranked[:count]))
        found = evaluate(problem, prune(problem, expand(problem, kept)))
        if best is None or _nearer(found, best, budget):
            best = found
        if found.peak_bytes <= budget:
            break
    assert best is not None
    return best


def _alike(problem: Problem, kept: set[int]) -> set[int]:
    """With what regions of the same graph keep alike."""
    chosen = {problem.decision[s] for s in kept if problem.names[s][0] in problem.shared}
    return kept | {s for s in problem.remaker if problem.decision[s] in chosen} if chosen else kept


def _ranked(problem: Problem) -> list[int]:
    """Remakeable storages, the first to keep first."""
    worth = {s: node.again_seconds / max(problem.nbytes[s], 1) for s, node in problem.remaker.items()}
    highest = max(worth.values(), default=0.0) or 1.0
    places = sorted(worth, key=problem.maker.__getitem__)
    bits = max(len(places).bit_length(), 1)
    spread = {s: int(f"{i:0{bits}b}"[::-1], 2) for i, s in enumerate(places)}
    return sorted(worth, key=lambda s: (-_grain(worth[s] / highest), spread[s]))


def _grain(share: float) -> int:
    """Worth in steps, so that noise in the timings does not hide that two are alike."""
    return -1000 if share <= 0 else round(math.log(share) / math.log1p(_STEP))


def _counts(problem: Problem, ranked: list[int], budget: int) -> Iterator[int]:
    """How many to keep: first as many as the budget has bytes for, then ever fewer."""
    room, count = budget, 0
    for s in ranked:
        room -= problem.nbytes[s]
        if room < 0:
            break
        count += 1
    while count > 0:
        yield count
        count = min(int(count * _SHRINK), count - 1)
    yield 0


def _nearer(a: Outcome, b: Outcome, budget: int) -> bool:
    """Whether ``a`` exceeds the budget less than ``b``, or as little in less time."""
    return (a.excess(budget), a.seconds) < (b.excess(budget), b.seconds)
