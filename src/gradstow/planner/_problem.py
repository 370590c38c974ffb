"""The step as the planner sees it: ops without views, storages as integers, one decision per storage.

Views cost nothing and resident storages are always there, so both vanish. Regions that run the same
graph (a block called in a loop) share their decisions, since they share their code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gradstow.ir import CostTable, Op, Region, StepGraph, StorageKind, applying, delivered_storages, deliveries


@dataclass(slots=True)
class Node:
    """One op: what it reads and makes, by storage number. ``again_*`` hold for a recomputation.

    ``delivers``: gradients that autograd gets once it has run, and that nobody may write over after that.
    A ``lazy`` one runs in the forward only where something that is kept, or read there, comes of it. One that
    ``decodes`` makes its output again from a code that was made of it; ``transfer`` seconds pass until that is there.
    What a node with a ``scope`` reads or makes lives at least until the last node of that scope has run.
    """

    region: int
    op: int
    seconds: float
    working: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    again_seconds: float = 0.0
    again_working: int = 0
    again_inputs: tuple[int, ...] = ()
    again_outputs: tuple[int, ...] = ()
    pinned: bool = False
    overwrites: tuple[int, ...] = ()
    delivers: tuple[int, ...] = ()
    lazy: bool = False
    decodes: bool = False
    transfer: float = 0.0
    scope: int = -1


@dataclass(slots=True)
class Problem:
    """Everything a solver needs.

    Attributes:
        forward, backward: nodes in the order of the step.
        nbytes: bytes by storage number.
        maker: storage → index in ``forward``, or -1 where it is not a forward op of its own region.
        decision: storage → decision; storages with the same decision are kept or not together.
        held: storages alive from their making to the end of the step (outputs that the caller holds).
        lasting: storages alive at least to the end of all forwards (outputs that the caller drops then).
        keepable: storages that can cross from the forward to the backward.
        always: storages that must be kept (boundaries, unmanaged regions).
        boundary: storages that a later region reads.
        fixed: held or boundary storages, which stay as they are even where an op makes a copy again.
        remaker: storage → the forward node that can make it again; absent where it must be kept.
        never: storages that are not kept: the user's rules forbid it, or a code stands for them.
        shared: regions that run the same graph as another one, and so the same schedule.
        tangents: by region, storages that are there when that region's backward starts.
        leaving: by region, gradients and tangents that are given up, at the latest, after its backward.
        passing: gradients that live to the end of a region's backward or longer, whoever reads them.
        delivered: gradients that leave while their region's backward runs.
        names: storage → (region, storage id); ``numbers`` is the way back.
        deaths: index in ``forward`` → storages that no later forward op reads.
        lazy: indices in ``forward`` of lazy nodes.
    """

    graph: StepGraph
    costs: CostTable
    forward: list[Node] = field(default_factory=list)
    backward: list[Node] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    maker: list[int] = field(default_factory=list)
    decision: list[int] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    lasting: set[int] = field(default_factory=set)
    keepable: set[int] = field(default_factory=set)
    always: set[int] = field(default_factory=set)
    boundary: set[int] = field(default_factory=set)
    fixed: set[int] = field(default_factory=set)
    remaker: dict[int, Node] = field(default_factory=dict)
    never: set[int] = field(default_factory=set)
    shared: set[int] = field(default_factory=set)
    tangents: dict[int, list[int]] = field(default_factory=dict)
    accumulated: set[int] = field(default_factory=set)
    leaving: dict[int, set[int]] = field(default_factory=dict)
    passing: set[int] = field(default_factory=set)
    delivered: set[int] = field(default_factory=set)
    names: list[tuple[int, int]] = field(default_factory=list)
    numbers: dict[tuple[int, int], int] = field(default_factory=dict)
    deaths: list[set[int]] = field(default_factory=list)
    lazy: list[int] = field(default_factory=list)


def build_problem(graph: StepGraph, costs: CostTable) -> Problem:
    """Reduce a StepGraph to the planner's view."""
    problem = Problem(graph, costs)
    groups: dict[tuple[str, int], int] = {}
    for r, region in enumerate(graph.regions):
        group = region.fingerprint or str(r)
        for s, storage in enumerate(region.storages):
            if storage.kind is StorageKind.RESIDENT or storage.origin is not None:
                continue
            number = len(problem.nbytes)
            problem.numbers[r, s] = number
            problem.names.append((r, s))
            problem.nbytes.append(storage.nbytes)
            problem.maker.append(-1)
            problem.decision.append(groups.setdefault((group, s), len(groups)))
    for r, region in enumerate(graph.regions):
        _add_nodes(problem, r, region, costs, backward=False)
        _add_outputs(problem, r, region)
    for r in reversed(range(len(graph.regions))):
        _add_nodes(problem, r, graph.regions[r], costs, backward=True)
    running = {node.region for node in problem.backward}
    for r, region in enumerate(graph.regions):
        _add_gradients(problem, r, region, running)
    for node in (*problem.forward, *problem.backward):
        node.overwrites = tuple(s for s in node.overwrites if s not in problem.boundary)
    problem.deaths = _deaths(problem)
    problem.lazy = [index for index, node in enumerate(problem.forward) if node.lazy]
    problem.keepable = {s for s, maker in enumerate(problem.maker) if maker >= 0}
    problem.fixed = problem.held | problem.boundary
    problem.remaker = {
        s: problem.forward[problem.maker[s]]
        for s in problem.keepable - problem.fixed - problem.always
        if _can_run_again(graph, problem.forward[problem.maker[s]], s)
    }
    problem.never = {s for node in problem.forward if node.decodes for s in node.again_outputs}
    prints = Counter(region.fingerprint or str(r) for r, region in enumerate(graph.regions))
    problem.shared = {r for r, region in enumerate(graph.regions) if prints[region.fingerprint or str(r)] > 1}
    return problem


def _can_run_again(graph: StepGraph, node: Node, storage: int) -> bool:
    return graph.regions[node.region].managed and not node.pinned and storage in node.again_outputs


def scope_ends(nodes: Sequence[Node]) -> list[int]:
    """For each node the index of the last one of its scope: itself where it has none."""
    ends = {(node.region, node.scope): index for index, node in enumerate(nodes) if node.scope >= 0}
    return [i if n.scope < 0 else ends[n.region, n.scope] for i, n in enumerate(nodes)]


def _deaths(problem: Problem) -> list[set[int]]:
    last: dict[int, int] = {}
    for end, node in zip(scope_ends(problem.forward), problem.forward, strict=True):
        for s in (*node.inputs, *node.outputs):
            last[s] = end
    for r, region in enumerate(problem.graph.regions):  # what crosses is given up after its last reader's forward
        end = sum(node.region <= r for node in problem.forward) - 1
        for value in region.inputs:
            crossing = _number(problem, r, region.values[value].storage)
            if crossing is not None:
                last[crossing] = max(last[crossing], end)
    deaths: list[set[int]] = [set() for _ in problem.forward]
    for s, index in last.items():
        if s not in problem.held and s not in problem.lasting:
            deaths[index].add(s)
    return deaths


def _number(problem: Problem, r: int, storage: int) -> int | None:
    """The planner's number of a region's storage; None for a resident one."""
    origin = problem.graph.regions[r].storages[storage].origin
    return problem.numbers.get((r, storage) if origin is None else origin)


def _add_nodes(problem: Problem, r: int, region: Region, costs: CostTable, *, backward: bool) -> None:
    def numbers(values: tuple[int, ...]) -> tuple[int, ...]:
        found = (_number(problem, r, region.values[v].storage) for v in values)
        known = [n for n in found if n is not None]
        return tuple(dict.fromkeys(reversed(known)))[::-1]  # the last use counts, as in just_in_time

    early = deliveries(region, at_once=not region.managed) if backward else {}
    leaving = delivered_storages(region, early)
    for index, op in enumerate(region.ops):
        if op.view or op.backward != backward:
            continue
        inputs = numbers(op.inputs)
        outputs = tuple(n for n in numbers(op.outputs) if n not in inputs)
        cost = costs.run(op)
        working = max(cost.working_bytes, applying(region, early.get(index, ())))
        node = Node(r, index, cost.seconds, working, inputs, outputs)
        node.pinned = bool(op.pinned) or cost.how == "unknown"
        node.overwrites = numbers(op.overwrites) if region.managed else ()
        node.scope, node.lazy = op.scope, op.lazy
        node.delivers = tuple(problem.numbers[r, s] for s in leaving.get(index, ()))
        problem.delivered.update(node.delivers)
        if not backward:
            _set_again(problem, node, op, costs, numbers)
        if not region.managed:
            problem.always.update(inputs if backward else ())
        (problem.backward if backward else problem.forward).append(node)
        if not backward:
            for n in outputs:
                problem.maker[n] = len(problem.forward) - 1


def _set_again(
    problem: Problem, node: Node, op: Op, costs: CostTable, numbers: Callable[[tuple[int, ...]], tuple[int, ...]]
) -> None:
    cost = costs.rerun(op)
    node.again_seconds, node.again_working = cost.seconds, cost.working_bytes
    if op.rerun is None:
        node.again_inputs, node.again_outputs = node.inputs, node.outputs
    else:
        node.again_inputs = numbers(op.rerun.inputs)
        node.again_outputs = numbers(op.rerun.outputs)
        node.decodes, node.transfer = bool(op.rerun.code), cost.transfer
    if cost.how == "unknown":
        node.pinned = True


def _add_outputs(problem: Problem, r: int, region: Region) -> None:
    for value in region.outputs:
        number = None if value < 0 else _number(problem, r, region.values[value].storage)
        if number is None:
            continue
        read_later = _read_later(problem.graph, r, problem.names[number])
        if region.held or (problem.graph.outputs_held and not read_later):
            problem.held.add(number)
        elif not read_later:
            problem.lasting.add(number)
    for value in region.inputs:
        storage = region.storages[region.values[value].storage]
        if storage.origin is not None and storage.origin in problem.numbers:
            problem.boundary.add(problem.numbers[storage.origin])


def _add_gradients(problem: Problem, r: int, region: Region, running: set[int]) -> None:
    """Tangents and gradients of a region, and when they are given up. ``running``: regions with a backward."""
    here = next((q for q in range(r, -1, -1) if q in running), r)
    leaving: dict[int, int] = {}
    ends = zip(region.gradients, region.accumulated, region.added, region.inputs, strict=True)
    for value, accumulated, added, given in ends:
        number = None if value < 0 else _number(problem, r, region.values[value].storage)
        if number is None or number in problem.delivered:
            continue
        problem.passing.add(number)
        if accumulated and not added:
            problem.accumulated.add(number)
            continue
        origin = region.storages[region.values[given].storage].origin
        target = r - 1 if accumulated or origin is None else origin[0]
        after = next((q for q in range(target + 1, here) if q in running), here)
        leaving[number] = min(after, leaving.get(number, here))
    tangents = problem.tangents.setdefault(here, [])
    root = r == len(problem.graph.regions) - 1 and not problem.graph.reserve_bytes
    for value in region.tangents:
        number = _number(problem, r, region.values[value].storage)
        if number is not None and (root or r in running or number in problem.passing):
            tangents.append(number)
            leaving.setdefault(number, here)
            if root:
                problem.accumulated.add(number)  # backward() itself holds the loss's gradient
    for number, last in leaving.items():
        if number not in problem.accumulated:
            problem.leaving.setdefault(last, set()).add(number)


def _read_later(graph: StepGraph, r: int, name: tuple[int, int]) -> bool:
    return any(item.origin == name for region in graph.regions[r + 1 :] for item in region.storages)
