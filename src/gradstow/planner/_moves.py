"""Local moves on an order: make a storage once more, so that it need not be there meanwhile; or once less.

Any set of reruns is a legal order, since what nothing makes again is kept. So a move is an insertion or a
removal, and following the result says what it is worth. The work is counted in evaluations, so that the result does
not depend on the machine.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from gradstow.planner._evaluate import Order, Outcome, evaluate
from gradstow.planner._problem import Node, Problem

_TRIED = 6  # candidates that are followed for each step of a repair
_CHAIN = 60  # reruns that one move may insert


def prune(problem: Problem, order: Order) -> Order:
    """The order without reruns that nothing reads."""
    needed: set[int] = set()
    result: Order = []
    for node, again in reversed(order):
        made = node.again_outputs if again else node.outputs
        if again and not any(s in needed and s not in problem.fixed for s in made):
            continue
        needed.difference_update(made)
        needed.update(node.again_inputs if again else node.inputs)
        result.append((node, again))
    return result[::-1]


def repair(problem: Problem, outcome: Outcome, budget: int, *, work: int) -> Outcome:
    """Bring the peak towards the budget by making more again; the outcome that is nearest to fitting."""
    while outcome.peak_bytes > budget and work > 0:
        excess = outcome.excess(budget)
        best: tuple[float, Outcome] | None = None
        for split in _splits(problem, outcome):
            found = evaluate(problem, _insert(outcome.order, split))
            work -= 1
            gain = excess - found.excess(budget)
            if gain > 0:
                worth = gain / max(found.seconds - outcome.seconds, 1e-9)
                if best is None or worth > best[0]:
                    best = worth, found
        if best is None:
            break
        outcome = best[1]
    return outcome


def improve(problem: Problem, outcome: Outcome, budget: int, *, work: int) -> Outcome:
    """Take out reruns, the slowest first, for as long as the peak stays within the budget."""
    tried: set[tuple[int, int, int]] = set()
    while work > 0:
        for position in _removable(problem, outcome, tried):
            order = prune(problem, outcome.order[:position] + outcome.order[position + 1 :])
            found = evaluate(problem, order)
            work -= 1
            if found.peak_bytes <= budget and found.seconds <= outcome.seconds:
                outcome = found
                break
            if work <= 0:
                break
        else:
            break
    return outcome


def _removable(problem: Problem, outcome: Outcome, tried: set[tuple[int, int, int]]) -> Iterator[int]:
    """Positions of reruns that were not tried yet, the slowest first."""
    served, number = {}, 0  # position → the backward op that it runs for
    for position, (_, again) in enumerate(outcome.order):
        served[position] = number
        number += not again
    reruns = [p for p, (n, again) in enumerate(outcome.order) if again and n.region not in problem.shared]
    for position in sorted(reruns, key=lambda p: -outcome.order[p][0].again_seconds):
        node = outcome.order[position][0]
        key = (node.region, node.op, served[position])
        if key not in tried:
            tried.add(key)
            yield position


@dataclass(frozen=True, slots=True)
class _Split:
    """Reruns to insert before ``position``, so that a storage need not live until there."""

    position: int
    nodes: tuple[Node, ...]


def _insert(order: Order, split: _Split) -> Order:
    return [*order[: split.position], *((node, True) for node in split.nodes), *order[split.position :]]


def _splits(problem: Problem, outcome: Outcome) -> list[_Split]:
    """The most promising ways to have less alive at the worst moment, most bytes per second first."""
    worst = outcome.peak_at - outcome.start
    candidates = _idle_at(problem, outcome, worst) if worst >= 0 else _kept_by(problem, outcome)
    lives = _Lives(problem, outcome)
    found: list[tuple[float, _Split]] = []
    for s in candidates:
        position = lives.next_use(s, max(worst, -1))
        nodes = lives.chain(s, position)
        if nodes:
            seconds = sum(node.again_seconds for node in nodes)
            found.append((problem.nbytes[s] / max(seconds, 1e-9), _Split(position, nodes)))
    found.sort(key=lambda item: -item[0])
    return [split for _, split in found[:_TRIED]]


def _idle_at(problem: Problem, outcome: Outcome, worst: int) -> Iterator[int]:
    """What is alive at a position of the order though nothing uses it there."""
    here = outcome.order[worst][0]
    used = {*here.inputs, *here.again_inputs, *here.outputs}
    for s, first, last in outcome.lives:
        if first < worst < last and s not in used and _can_move(problem, s):
            yield s


def _kept_by(problem: Problem, outcome: Outcome) -> Iterator[int]:
    """The worst moment is in the forward: what is kept by then."""
    worst = min(outcome.peak_at, len(problem.forward) - 1)
    for s, first, _ in outcome.lives:
        if first < 0 and _can_move(problem, s) and problem.maker[s] <= worst:
            yield s


def _can_move(problem: Problem, s: int) -> bool:
    return s in problem.remaker and problem.remaker[s].region not in problem.shared


class _Lives:
    """When each storage is there, and when it is read."""

    def __init__(self, problem: Problem, outcome: Outcome) -> None:
        self.problem = problem
        self.codes = {u for index in problem.lazy for u in problem.forward[index].outputs}
        self.spans: dict[int, list[tuple[int, int]]] = {}
        for s, first, last in outcome.lives:
            self.spans.setdefault(s, []).append((first, last))
        self.reads: dict[int, list[int]] = {}
        for position, (node, again) in enumerate(outcome.order):
            for s in node.again_inputs if again else node.inputs:
                self.reads.setdefault(s, []).append(position)

    def next_use(self, s: int, position: int) -> int:
        reads = self.reads[s]
        return reads[bisect_right(reads, position)]

    def there(self, s: int, position: int) -> bool:
        """Alive just before ``position``, or always."""
        if s not in self.problem.remaker:
            return True
        return any(first < position <= last for first, last in self.spans.get(s, ()))

    def chain(self, s: int, position: int) -> tuple[Node, ...]:
        """What must run before ``position`` to make ``s`` there; empty where that is too much.

        Codes that are smaller than ``s`` are kept for it, if they are not yet: to encode again would read the value.
        """
        nodes: dict[int, Node] = {}
        made: set[int] = set()
        stack, nbytes = [s], self.problem.nbytes
        while stack:
            storage = stack[-1]
            source = self.problem.remaker[storage]
            missing = [
                u
                for u in source.again_inputs
                if not (u in made or self.there(u, position) or (u in self.codes and nbytes[u] < nbytes[s]))
            ]
            if missing:
                stack += missing
            else:
                stack.pop()
                nodes.setdefault(id(source), source)
                made.update(source.again_outputs)
            if len(nodes) + len(stack) > _CHAIN:
                return ()
        return tuple(nodes.values())
