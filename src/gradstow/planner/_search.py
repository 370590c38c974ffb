"""Find the cheapest order for a budget: solve the program, follow its solution, mend it, add moments, again."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradstow._errors import PolicyError
from gradstow.planner._evaluate import Outcome, evaluate, expand
from gradstow.planner._greedy import greedy
from gradstow.planner._moves import improve, prune, repair
from gradstow.planner._problem import Problem
from gradstow.planner._program import Stages

_MOMENTS_PER_ROUND = 4
_LONG = 1000  # runs of a backward that are followed in a few milliseconds
_APART = 3  # moments of one round are further apart than this


@dataclass(frozen=True, slots=True)
class Effort:
    """How much work a search may do, counted, so that the same input gives the same plan.

    Attributes:
        rounds: programs to solve at most; 0 leaves the solver out, and with it the proven bound.
        gap: relative gap at which a program counts as solved, and the search as finished (of the whole step's time).
        moves: evaluations for mending and improving one solution of a step of a thousand ops; fewer for longer ones.
        nodes: branches of one program.
        seconds: emergency brake of one program.
        interruptible: whether Ctrl-C ends the search with the best order so far, where there is one.
    """

    rounds: int = 6
    gap: float = 0.003
    moves: int = 400
    nodes: int = 1
    seconds: float = 60.0
    interruptible: bool = False

    @staticmethod
    def of(effort: str | Effort) -> Effort:
        """From a name: "quick" (no solver), "normal" or "thorough".

        Raises:
            PolicyError: another name.
        """
        if isinstance(effort, Effort):
            return effort
        if effort not in _EFFORTS:
            raise PolicyError(f"there is no effort {effort!r}. Choose {', '.join(_EFFORTS)}.")
        return _EFFORTS[effort]


_EFFORTS = {
    "quick": Effort(rounds=0),
    "normal": Effort(),
    "thorough": Effort(rounds=12, gap=0.001, moves=2000, nodes=200, seconds=300.0),
}


@dataclass(slots=True)
class Found:
    """The best order that fits, or None; a proven lower bound on the added seconds; whether nothing fits, proven."""

    outcome: Outcome | None
    bound: float = 0.0
    infeasible: bool = False
    interrupted: bool = False
    rounds: int = 0
    moments: set[int] = field(default_factory=set)


def search(
    problem: Problem, stages: Stages, budget: int, effort: Effort, *, moments: frozenset[int] = frozenset()
) -> Found:
    """The cheapest order whose followed peak is at or under ``budget`` step bytes.

    ``moments``: those of a neighbouring budget, to start from.
    """
    found = Found(None, moments=set(moments))
    try:
        _search(problem, stages, budget, effort, found)
    except KeyboardInterrupt:
        if not effort.interruptible or found.outcome is None:
            raise
        found.interrupted = True
    return found


def _search(problem: Problem, stages: Stages, budget: int, effort: Effort, found: Found) -> None:
    _take(found, settle(problem, greedy(problem, budget), budget, effort), budget)
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


def settle(problem: Problem, outcome: Outcome, budget: int, effort: Effort) -> Outcome:
    """Mend an outcome that exceeds the budget, then use what room is left."""
    work = max(effort.moves * _LONG // max(len(outcome.order), _LONG), 20)
    outcome = repair(problem, outcome, budget, work=work)
    if outcome.peak_bytes > budget:
        return outcome
    return improve(problem, outcome, budget, work=work)


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
