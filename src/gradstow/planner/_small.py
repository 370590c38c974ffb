"""Small problems are searched through: every kept set, and where there are few ops every order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress, product

from gradstow.planner._evaluate import Order, Outcome, evaluate, expand
from gradstow.planner._problem import Node, Problem

_DECISIONS = 9  # 512 kept sets
_CHOICES = 12  # 4096 orders


def outcomes(problem: Problem) -> Iterator[Outcome]:
    """All outcomes of a small problem; none of a large one."""
    groups = _groups(problem)
    if len(groups) > _DECISIONS:
        return
    for choice in product((False, True), repeat=len(groups)):
        kept: set[int] = set().union(*compress(groups, choice))
        yield evaluate(problem, expand(problem, kept))
    for order in _orders(problem):
        yield evaluate(problem, order)


def best(problem: Problem, budget: int) -> Outcome | None:
    """The cheapest outcome of a small problem that fits, of those the one with the lowest peak."""
    fitting = (o for o in outcomes(problem) if o.peak_bytes <= budget)
    return min(fitting, key=lambda o: (round(o.seconds, 12), o.peak_bytes), default=None)


def _groups(problem: Problem) -> list[set[int]]:
    """Storages that can be kept or made again, by decision."""
    read = {s for node in problem.backward for s in node.inputs}
    read.update(s for node in problem.forward for s in node.again_inputs)
    groups: dict[int, set[int]] = {}
    for s in sorted(problem.remaker.keys() & read):
        groups.setdefault(problem.decision[s], set()).add(s)
    return list(groups.values())


def _orders(problem: Problem) -> Iterator[Order]:
    """Every choice of forward ops to run again before each backward op, in graph order."""
    if problem.shared:
        return
    again: list[Node] = list({id(n): n for n in problem.remaker.values()}.values())
    again.sort(key=lambda node: (node.region, node.op))
    by_region = {r: [n for n in again if n.region == r] for r in {n.region for n in problem.backward}}
    if sum(len(by_region[node.region]) for node in problem.backward) > _CHOICES:
        return
    slots = [_subsets(by_region[node.region]) for node in problem.backward]
    for chosen in product(*slots):
        order: Order = []
        for node, reruns in zip(problem.backward, chosen, strict=True):
            order += [(n, True) for n in reruns]
            order.append((node, False))
        yield order


def _subsets(nodes: list[Node]) -> list[list[Node]]:
    return [list(compress(nodes, choice)) for choice in product((False, True), repeat=len(nodes))]
