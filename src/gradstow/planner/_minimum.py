"""The smallest step peak that the planner can reach, and the highest that it can prove nothing to be under."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradstow.planner import _small
from gradstow.planner._evaluate import Outcome, evaluate, expand
from gradstow.planner._moves import repair
from gradstow.planner._problem import Problem
from gradstow.planner._program import Stages
from gradstow.planner._search import Effort, search

_CLOSE = 50  # bytes are told apart to one part in so many
_STEPS = 12


@dataclass(frozen=True, slots=True)
class Minimum:
    """``outcome`` has the lowest peak found; no schedule's peak is under ``proven_bytes``."""

    outcome: Outcome
    proven_bytes: int


def minimum(problem: Problem, stages: Stages, effort: Effort) -> Minimum:
    """Look for the lowest peak, whatever it costs in time.

    It does not depend on the budget that was asked for: a budget at this peak or above it can always be met.
    """
    proven = _plain_bound(problem, stages)
    best = min(_small.outcomes(problem), key=_lowest_first, default=None)
    best = min((o for o in (best, _lowest(problem, proven, effort)) if o is not None), key=_lowest_first)
    low, moments = proven, frozenset[int]()
    quick = replace(effort, rounds=min(effort.rounds, 3), gap=0.1)
    for _ in range(_STEPS):
        if best.peak_bytes - low <= best.peak_bytes // _CLOSE:
            break
        middle = (low + best.peak_bytes) // 2
        found = search(problem, stages, middle, quick, moments=moments)
        moments |= found.moments
        if found.outcome is not None:
            best = found.outcome
        else:
            low = middle
            proven = middle if found.infeasible else proven
    return Minimum(best, min(proven, best.peak_bytes))


def _lowest(problem: Problem, target: int, effort: Effort) -> Outcome:
    """The lowest peak of a few orders that are mended as far as it goes."""
    starts = (set(problem.keepable), set[int]())
    outcomes = [evaluate(problem, expand(problem, kept)) for kept in starts]
    outcomes += [repair(problem, outcome, target, work=effort.moves) for outcome in outcomes]
    return min(outcomes, key=_lowest_first)


def _lowest_first(outcome: Outcome) -> tuple[int, float]:
    return outcome.peak_bytes, outcome.seconds


def _plain_bound(problem: Problem, stages: Stages) -> int:
    """What each op of the step needs by itself: its inputs, its outputs, its own memory, gradients so far."""
    lowest = problem.graph.outside_bytes
    peak = lowest
    for node, fixed in zip(problem.backward, stages.fixed_bytes, strict=True):
        reads = sum(problem.nbytes[s] for s in node.inputs if s in stages.wanted)
        peak = max(peak, lowest + fixed + reads)
    return peak
