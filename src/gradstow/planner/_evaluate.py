"""Seconds and peak of a set of kept storages, in about a millisecond: the inner loop of every search.

The rule of the schedule: what the backward needs and was not kept is made again just before its first
use, from whatever is there, and lives until its last use. ``planner/_schedule`` writes the same rule down
as events, and ``ir.replay`` of those events is the last word.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradstow.planner._problem import Node, Problem, scope_ends


@dataclass(slots=True)
class Outcome:
    """What a set of kept storages leads to.

    Attributes:
        peak_bytes: highest live bytes of the step, above what is resident.
        seconds: recomputation added to the step.
        kept: the storages really kept (with those that no op may make again).
        backward: the backward as run: (node, whether it is a recomputation).
        during: live bytes at each moment, forwards first.
        peak_at: index into ``during``.
        last_use: storage → index in ``backward`` of its last use.
    """

    peak_bytes: int
    seconds: float
    kept: set[int]
    backward: list[tuple[Node, bool]]
    during: list[int]
    peak_at: int
    last_use: dict[int, int]


def evaluate(problem: Problem, kept: set[int], *, reuse: bool = True) -> Outcome:
    """Follow the whole step for these kept storages. ``reuse``: whether dying inputs are written over."""
    order, kept, seconds = _expand(problem, kept)
    live_at_end, during = _forward(problem, kept, reuse)
    last_use = _last_uses(order, kept | problem.held)
    _backward(problem, kept, order, last_use, live_at_end, during, reuse)
    peak_at = max(range(len(during)), key=during.__getitem__, default=-1)
    return Outcome(max(during, default=0), seconds, kept, order, during, peak_at, last_use)


def _expand(problem: Problem, wanted: set[int]) -> tuple[list[tuple[Node, bool]], set[int], float]:
    """The backward with its recomputations, the storages that turn out to be kept, the added seconds."""
    kept = wanted & problem.keepable
    available = kept | problem.held | problem.always
    for tangents in problem.tangents.values():
        available.update(tangents)
    order: list[tuple[Node, bool]] = []
    seconds = 0.0
    forward, maker, boundary = problem.forward, problem.maker, problem.boundary
    for node in problem.backward:
        stack = [s for s in node.inputs if s not in available]
        while stack:
            storage = stack[-1]
            if storage in available:
                stack.pop()
                continue
            source = forward[maker[storage]] if maker[storage] >= 0 else None
            if source is None or source.pinned or storage in boundary or storage not in source.again_outputs:
                kept.add(storage)
                available.add(storage)
                stack.pop()
                continue
            missing = [s for s in source.again_inputs if s not in available]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            order.append((source, True))
            seconds += source.again_seconds
            available.update(source.again_outputs)
        order.append((node, False))
        available.update(node.outputs)
    kept |= problem.always
    read: set[int] = set()
    for node, again in order:
        read.update(node.again_inputs if again else node.inputs)
    return order, kept & read, seconds


def _forward(problem: Problem, kept: set[int], reuse: bool) -> tuple[int, list[int]]:
    nbytes = problem.nbytes
    live, during = problem.graph.outside_bytes, []
    for node, deaths in zip(problem.forward, problem.deaths, strict=True):
        dying = deaths - kept
        new = sum(nbytes[s] for s in node.outputs)
        taken = next((nbytes[s] for s in node.overwrites if s in dying), 0) if reuse else 0
        during.append(live + new + node.working - taken)
        live += new - sum(nbytes[s] for s in dying)
    if problem.graph.reserve_bytes:
        during.append(live + problem.graph.reserve_bytes)
    return live - sum(nbytes[s] for s in problem.lasting - kept), during


def _last_uses(order: list[tuple[Node, bool]], present: set[int]) -> dict[int, int]:
    last: dict[int, int] = {}
    for index, (end, (node, again)) in enumerate(zip(scope_ends([n for n, _ in order]), order, strict=True)):
        end = index if again else end
        for s in node.again_inputs if again else node.inputs:
            last[s] = end
        for s in node.again_outputs if again else node.outputs:
            if s not in present:
                last[s] = end
    return last


def _backward(
    problem: Problem,
    kept: set[int],
    order: list[tuple[Node, bool]],
    last_use: dict[int, int],
    live: int,
    during: list[int],
    reuse: bool,
) -> None:
    nbytes, held, stay = problem.nbytes, problem.held, problem.passing | problem.accumulated
    tangents = {s for storages in problem.tangents.values() for s in storages}
    ends = _region_ends(order)
    dies: list[list[int]] = [[] for _ in order]
    for s, index in last_use.items():
        if s not in held and s not in stay:
            dies[index].append(s)
    present = kept | held | tangents
    current = -1
    for index, (node, again) in enumerate(order):
        if node.region != current:
            current = node.region
            live += sum(nbytes[s] for s in problem.tangents[current])
        outputs = node.again_outputs if again else node.outputs
        new = 0
        for s in outputs:
            new += nbytes[s]
        fresh = new - sum(nbytes[s] for s in outputs if s in present) if again else new
        extra = node.again_working if again else node.working
        if reuse:
            for s in node.overwrites:
                if last_use.get(s) == index and s not in present and s not in stay:
                    extra -= nbytes[s]
                    break
        during.append(live + new + extra)
        live += fresh
        for s in dies[index]:
            live -= nbytes[s]
        if ends[current] == index:
            live -= sum(nbytes[s] for s in problem.leaving.get(current, ()) if s in stay or s not in last_use)


def _region_ends(order: list[tuple[Node, bool]]) -> dict[int, int]:
    return {node.region: index for index, (node, _) in enumerate(order)}
