"""Find the cheapest order for a budget: solve the program, follow its solution, mend it, add moments, again."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradstow.planner._evaluate import Outcome, evaluate, expand
from gradstow.planner._moves import improve, prune, repair
from gradstow.planner._problem import Problem
from gradstow.planner._program import Stages

_MOMENTS_PER_ROUND = 4
_APART = 3  # moments of one round are further apart than this


@dataclass(frozen=True, slots=True)
class Effort:
    """How much work a search may do. Counted, so that the same input gives the same plan; seconds only stop a solver
    that runs away.

    Attributes:
        rounds: programs to solve at most.
        gap: relative gap at which a program counts as solved, and the search as finished (of the whole step's time).
        moves: evaluations for mending and improving one solution.
        nodes: branches of one program.
        seconds: emergency brake of one program.
    """

    rounds: int = 6
    gap: float = 0.003
    moves: int = 400
    nodes: int = 1
    seconds: float = 60.0


@dataclass(slots=True)
class Found:
    """The best order that fits, or None; a proven lower bound on the added seconds; whether nothing fits, proven."""

    outcome: Outcome | None
    bound: float = 0.0
    infeasible: bool = False
    rounds: int = 0
    moments: set[int] = field(default_factory=set)


def search(
    problem: Problem, stages: Stages, budget: int, effort: Effort, *, moments: frozenset[int] = frozenset()
) -> Found:
    """The cheapest order whose followed peak is at or under ``budget`` step bytes.

    ``moments``: those of a neighbouring budget, to start from.
    """
    found = Found(None, moments=set(moments))
    step = sum(node.seconds for node in (*problem.forward, *problem.backward))
    while found.rounds < effort.rounds:
        found.rounds += 1
        solution = stages.solve(budget, found.moments, gap=effort.gap, seconds=effort.seconds, nodes=effort.nodes)
        found.bound = max(found.bound, solution.bound)
        if solution.kept is None:
            found.infeasible = solution.infeasible
            break
        order = prune(problem, expand(problem, solution.kept, solution.without))
        followed = evaluate(problem, order)
        _take(found, settle(problem, followed, budget, effort), budget)
        best = found.outcome
        if best is not None and best.seconds - found.bound <= effort.gap * (step + found.bound):
            break
        new = _overflows(problem, followed, budget) - found.moments
        if not new:
            break
        found.moments |= new
    return found


def settle(problem: Problem, outcome: Outcome, budget: int, effort: Effort) -> Outcome:
    """Mend an outcome that exceeds the budget, then use what room is left."""
    outcome = repair(problem, outcome, budget, work=effort.moves)
    if outcome.peak_bytes > budget:
        return outcome
    return improve(problem, outcome, budget, work=effort.moves)


def _take(found: Found, outcome: Outcome, budget: int) -> None:
    fits = outcome.peak_bytes <= budget
    if fits and (found.outcome is None or outcome.seconds < found.outcome.seconds):
        found.outcome = outcome


def _overflows(problem: Problem, outcome: Outcome, budget: int) -> set[int]:
    """The worst moments over the budget, as the program counts them."""
    forwards, start = len(problem.forward), outcome.start
    over: dict[int, int] = {}
    ops_before = 0
    for index, nbytes in enumerate(outcome.during):
        if index < forwards:
            moment = -1 - index
        elif index < start:
            continue  # the reserve for the loss: the start of the backward covers it
        else:
            moment = ops_before
            ops_before += not outcome.order[index - start][1]
        if nbytes > budget:
            over[moment] = max(over.get(moment, 0), nbytes - budget)
    chosen: list[int] = []
    for moment in sorted(over, key=over.__getitem__, reverse=True):
        if len(chosen) == _MOMENTS_PER_ROUND:
            break
        if all(abs(moment - other) > _APART for other in chosen):
            chosen.append(moment)
    return set(chosen)
