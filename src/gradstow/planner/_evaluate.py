"""Seconds and bytes of an order of runs, in about a millisecond: the inner loop of every search.

An order is the backward as it runs: each backward op, and before it the forward ops that run again for it.
That is a whole decision: what is read before it is made again is kept from the forward, and each life of a
storage ends with its last use. ``ir.write_events`` writes the same down as events, and ``ir.replay`` of
those is the last word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradstow.planner._problem import Node, Problem, scope_ends

Order = list[tuple[Node, bool]]  # (node, whether it is a recomputation)
_FORBIDDEN = 1 << 62  # the peak of an order that keeps what the user's rules forbid to keep
NOTHING: Mapping[int, set[int]] = {}


@dataclass(slots=True)
class Outcome:
    """What an order leads to.

    Attributes:
        order: the backward as run.
        peak_bytes: highest live bytes of the step, above what is resident.
        seconds: recomputation added to the step.
        kept: storages that cross from the forward to the backward.
        during: live bytes at each moment, forwards first.
        lives: (storage, first position, last position) in ``order``; -1 for what is there at its start.
        idle: forward nodes, by index, that do not run.
    """

    order: Order
    peak_bytes: int
    seconds: float
    kept: set[int]
    during: list[int]
    lives: list[tuple[int, int, int]]
    idle: frozenset[int] = frozenset()

    @property
    def start(self) -> int:
        """Index in ``during`` of the backward's first moment."""
        return len(self.during) - len(self.order)

    @property
    def peak_at(self) -> int:
        return max(range(len(self.during)), key=self.during.__getitem__, default=-1)

    def excess(self, budget: int) -> int:
        """Bytes over the budget, summed over the moments: how far an order is from fitting."""
        return sum(nbytes - budget for nbytes in self.during if nbytes > budget)


def evaluate(problem: Problem, order: Order, *, reuse: bool = True) -> Outcome:
    """Follow the whole step. ``reuse``: whether dying inputs are written over."""
    lives, kept, dies, beside = _lives(problem, order)
    idle = _idle(problem, kept)
    live, during = _forward(problem, kept, idle, reuse)
    _backward(problem, kept, order, dies, beside, live, during, reuse)
    seconds = sum(node.again_seconds for node, again in order if again)
    seconds += sum(problem.forward[i].seconds for i in problem.lazy if i not in idle)
    peak = _FORBIDDEN if kept & problem.never else max(during, default=problem.graph.outside_bytes)
    return Outcome(order, peak, seconds, kept, during, lives, idle)


def expand(problem: Problem, kept: set[int], without: Mapping[int, set[int]] = NOTHING) -> Order:
    """The order that keeps ``kept`` and makes what is missing again just before its first use.

    ``without`` maps a backward op (its position in ``problem.backward``) to storages that must not be there
    while it runs, unless it reads them: what needs them later makes them once more. What no op may make again
    is kept whether asked for or not.
    """
    available = (kept & problem.keepable - problem.never) | problem.fixed | problem.always
    for tangents in problem.tangents.values():
        available.update(tangents)
    order: Order = []
    for position, node in enumerate(problem.backward):
        stack = [s for s in node.inputs if s not in available]
        while stack:
            storage = stack[-1]
            source = problem.remaker.get(storage)
            if storage in available or source is None:
                available.add(storage)
                stack.pop()
                continue
            missing = [s for s in source.again_inputs if s not in available]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            order.append((source, True))
            available.update(source.again_outputs)
        gone = without.get(position)
        if gone and node.region not in problem.shared:
            available -= {s for s in gone & problem.remaker.keys() if s not in node.inputs}
        order.append((node, False))
        available.update(node.outputs)
    return order


def _lives(
    problem: Problem, order: Order
) -> tuple[list[tuple[int, int, int]], set[int], list[list[int]], list[set[int]]]:
    """Lives of all storages; what is kept; by position what dies; and what is made beside a copy that is held."""
    fixed = problem.fixed
    ends = scope_ends([node for node, _ in order])
    opened: dict[int, int] = {}
    lives: list[tuple[int, int, int]] = []
    dies: list[list[int]] = [[] for _ in order]
    beside: list[set[int]] = [_NONE] * len(order)
    for position in range(len(order) - 1, -1, -1):
        node, again = order[position]
        end = position if again else ends[position]
        for s in () if again else node.delivers:
            opened.setdefault(s, end)
        for s in node.again_outputs if again else node.outputs:
            if again and s in fixed:
                beside[position] = beside[position] | {s}
                continue
            last = opened.pop(s, end)
            lives.append((s, position, last))
            dies[last].append(s)
        for s in node.again_inputs if again else node.inputs:
            opened.setdefault(s, end)
    for s, last in opened.items():
        lives.append((s, -1, last))
        dies[last].append(s)
    kept = {s for s in opened if problem.maker[s] >= 0} | (problem.always & opened.keys())
    return lives, kept, dies, beside


_NONE: set[int] = set()


def _idle(problem: Problem, kept: set[int]) -> frozenset[int]:
    """Lazy nodes that serve nobody. What they read is read by lazy nodes alone, or made before them anyway."""
    wanted, idle = set(kept), set()
    for index in reversed(problem.lazy):
        node = problem.forward[index]
        if wanted.isdisjoint(node.outputs):
            idle.add(index)
        else:
            wanted.update(node.inputs)
    return frozenset(idle)


def _forward(problem: Problem, kept: set[int], idle: frozenset[int], reuse: bool) -> tuple[int, list[int]]:
    nbytes = problem.nbytes
    live, during = problem.graph.outside_bytes, []
    for index, (node, deaths) in enumerate(zip(problem.forward, problem.deaths, strict=True)):
        dying = deaths - kept
        if index in idle:
            during.append(0)
            live -= sum(nbytes[s] for s in dying if problem.maker[s] not in idle)
            continue
        new = sum(nbytes[s] for s in node.outputs)
        taken = next((nbytes[s] for s in node.overwrites if s in dying), 0) if reuse else 0
        during.append(live + new + node.working - taken)
        live += new - sum(nbytes[s] for s in dying)
    if problem.graph.reserve_bytes:
        during.append(live + problem.graph.reserve_bytes)
    return live - sum(nbytes[s] for s in problem.lasting - kept), during


def _backward(
    problem: Problem,
    kept: set[int],
    order: Order,
    dies: Sequence[list[int]],
    beside: Sequence[set[int]],
    live: int,
    during: list[int],
    reuse: bool,
) -> None:
    nbytes, held, stay = problem.nbytes, problem.held, problem.passing | problem.accumulated
    tangents = {s for storages in problem.tangents.values() for s in storages}
    untouchable = kept | held | tangents | problem.delivered
    seen: set[int] = set()
    ends = {node.region: index for index, (node, _) in enumerate(order)}
    current = -1
    for index, (node, again) in enumerate(order):
        if node.region != current:
            current = node.region
            live += sum(nbytes[s] for s in problem.tangents[current])
        outputs = node.again_outputs if again else node.outputs
        new = sum(nbytes[s] for s in outputs)
        extra = node.again_working if again else node.working
        dying = dies[index]
        if reuse and node.overwrites and not (node.outputs and node.outputs[0] in untouchable):
            for s in node.overwrites:
                if s in dying and s not in untouchable and s not in stay:
                    extra -= nbytes[s]
                    break
        during.append(live + new + extra)
        live += new - sum(nbytes[s] for s in beside[index])
        for s in dying:
            if s not in held and s not in stay:
                live -= nbytes[s]
        seen.update(outputs)
        seen.update(node.inputs)
        if ends[current] == index:
            live -= sum(nbytes[s] for s in problem.leaving.get(current, ()) if s in stay or s not in seen)
