"""Fetch what waits elsewhere early enough, as far as the budget has room for it."""

from __future__ import annotations

from gradstow.planner._evaluate import Order, evaluate
from gradstow.planner._problem import Node, Problem


def prefetched(problem: Problem, order: Order, budget: int | None) -> Order:
    """The order with each fetch moved towards the front, until what runs meanwhile takes as long as it does.

    The last one first: a place serves one after the other, so what is fetched later starts later. Where the early copy
    does not fit, it starts as early as it does. ``budget`` None: at most what the order needs anyway.
    """
    fetches = [node for node, again in order if again and node.transfer]
    if not fetches:
        return order
    limit = evaluate(problem, order).peak_bytes if budget is None else budget
    free = float("inf")  # when the place must be done with it, counted from the front
    for node in reversed(fetches):
        position = max(p for p, (other, again) in enumerate(order) if again and other is node)
        starts, ends = _clock(order), position
        latest = min(starts[position], free) - node.transfer
        target = next((p for p in range(ends, -1, -1) if starts[p] <= latest or _begins(order, p, node)), 0)
        order, moved = _moved(problem, order, position, target, limit)
        free = max(latest, _clock(order)[moved])
    return order


def _moved(problem: Problem, order: Order, position: int, target: int, limit: int) -> tuple[Order, int]:
    """As far towards the target as fits."""
    while target < position:
        rest = order[:position] + order[position + 1 :]
        found = [*rest[:target], order[position], *rest[target:]]
        if evaluate(problem, found).peak_bytes <= limit:
            return found, target
        target += -(-(position - target) // 2)
    return order, position


def _clock(order: Order) -> list[float]:
    """When each run starts."""
    found, clock = [], 0.0
    for node, again in order:
        found.append(clock)
        clock += node.again_seconds if again else node.seconds
    return found


def _begins(order: Order, position: int, node: Node) -> bool:
    """Whether the node's region begins here: only there its reruns may run."""
    return position == 0 or order[position - 1][0].region != node.region
