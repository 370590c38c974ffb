"""The planner's integer program: which storages are alive at some moments of the step, which ops run between them.

Moments cut the backward into stages; the first one starts where the forward ends. For each storage and moment the
program decides whether it is alive, for each op and stage whether it runs again:

- what a stage's backward ops read is alive when the stage starts, or made again in it;
- what runs again finds its inputs in the same way;
- what is alive at a moment was alive at the one before, or was made again between them;
- what is alive at a moment fits the budget beside what is there anyway (gradients, outputs, the op's own memory).

Every schedule with this order of backward ops obeys these rules, whatever it does between the moments. So the
program is a relaxation: its bound is a proven lower bound on the added seconds, and where it has no solution no
schedule has one. Moments are added where a solution, followed, exceeds the budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field

import numpy as np

from gradstow.planner._problem import Problem, scope_ends


@dataclass(frozen=True, slots=True)
class Solution:
    """A solution of the program.

    Attributes:
        kept: storages to keep, or None where none was found.
        without: backward op → storages that are not alive while it runs.
        bound: proven lower bound on the added seconds of any schedule.
        infeasible: proven that no schedule fits.
    """

    kept: set[int] | None
    without: dict[int, set[int]]
    bound: float
    infeasible: bool = False


class Stages:
    """What the programs of one problem have in common."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.wanted = _wanted(problem)
        self.fixed_bytes = _fixed_bytes(problem)

    def solve(self, budget: int, moments: Set[int], *, gap: float, seconds: float, nodes: int = 10_000_000) -> Solution:
        """The cheapest solution for ``budget`` step bytes with these moments.

        A moment from 0 up is a backward op, by its position; ``-1 - i`` is forward op ``i``. ``gap`` is relative;
        ``nodes`` bounds the work of the search, and ``seconds`` is the emergency brake.
        """
        return _Program(self, budget, moments).solve(gap, seconds, nodes)

    def needs(self, first: int, last: int) -> set[int]:
        """Wanted storages that the backward ops from ``first`` up to, not including, ``last`` read."""
        return {s for node in self.problem.backward[first:last] for s in node.inputs if s in self.wanted}

    def closure(self, storages: Set[int]) -> set[int]:
        """The storages, and all that making them again could read."""
        return _closure(self.problem, storages, self.wanted)


def _wanted(problem: Problem) -> frozenset[int]:
    """Forward storages that the backward reads, and all that making them again could read."""
    ours = {s for s in problem.keepable | problem.boundary if s not in problem.held}
    read = {s for node in problem.backward for s in node.inputs if s in ours}
    return frozenset(_closure(problem, read, ours))


def _closure(problem: Problem, storages: Set[int], within: Set[int]) -> set[int]:
    seen, todo = set(storages), list(storages)
    while todo:
        source = problem.remaker.get(todo.pop())
        for u in source.again_inputs if source is not None else ():
            if u in within and u not in seen:
                seen.add(u)
                todo.append(u)
    return seen


@dataclass(slots=True)
class _Rows:
    """Constraints ``sum(coefficient * variable) <= limit``, row by row."""

    row: list[int] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    factor: list[float] = field(default_factory=list)
    limit: list[float] = field(default_factory=list)

    def add(self, terms: list[tuple[int, float]], limit: float) -> None:
        for column, factor in terms:
            self.row.append(len(self.limit))
            self.column.append(column)
            self.factor.append(factor)
        self.limit.append(limit)


class _Program:
    """One program: variables alive[stage][storage] and rerun[stage][forward op].

    Crumbs, storages too small to matter, are always alive and weigh nothing: that keeps it a relaxation.
    """

    def __init__(self, stages: Stages, budget: int, moments: Set[int]) -> None:
        self.s, self.p = stages, stages.problem
        self.budget = budget - self.p.graph.outside_bytes
        self.cuts = [-1, *sorted(m for m in moments if m >= 0)]
        self.forward_moments = sorted(-1 - m for m in moments if m < 0)
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.cost: list[float] = []
        self.integer: list[int] = []
        self.rows = _Rows()
        crumb = max(budget // 20000, 1024)
        self.crumbs = {s for s in stages.wanted if self.p.nbytes[s] <= crumb} - self.p.never
        self.read, self.useful = self._scope()
        self.alive: list[dict[int, int]] = [{} for _ in self.cuts]
        self.rerun: list[dict[int, int]] = [{} for _ in self.cuts]
        self._add_variables()
        self._add_precedence()
        self._add_capacity()

    def _scope(self) -> tuple[list[set[int]], list[set[int]]]:
        """By stage: what its ops read (the op at its start reads it from what is alive), and what could be of use."""
        ends = [*self.cuts[1:], len(self.p.backward)]
        read = [self.s.needs(cut + 1, end) for cut, end in zip(self.cuts, ends, strict=True)]
        useful: list[set[int]] = [set() for _ in self.cuts]
        later: set[int] = set()
        for stage in reversed(range(len(self.cuts))):
            useful[stage] = self.s.closure(read[stage] | later)
            later = useful[stage] | self._at_start(stage)
        return read, useful

    def _at_start(self, stage: int) -> set[int]:
        """What the op at a stage's start reads, so that it must be alive."""
        cut = self.cuts[stage]
        return self.s.needs(cut, cut + 1) if cut >= 0 else set()

    def _variable(self, cost: float, lower: bool, integer: bool) -> int:
        self.lower.append(float(lower))
        self.upper.append(1.0)
        self.cost.append(cost)
        self.integer.append(int(integer))
        return len(self.cost) - 1

    def _add_variables(self) -> None:
        problem = self.p
        decisions: dict[int, int] = {}  # storages of one decision are kept together
        for stage, cut in enumerate(self.cuts):
            at_start = self._at_start(stage)
            read = self.s.needs(max(cut, 0), len(problem.backward)) - problem.remaker.keys()  # there, come what may
            for s in sorted((self.useful[stage] | at_start) - self.crumbs):
                shared = problem.names[s][0] in problem.shared
                if stage and (s in read or shared) and s in self.alive[0]:
                    self.alive[stage][s] = self.alive[0][s]
                elif stage:
                    self.alive[stage][s] = self._variable(0.0, s in at_start, True)
                else:
                    decision = problem.decision[s]
                    if decision not in decisions:
                        maker = problem.forward[problem.maker[s]] if problem.maker[s] >= 0 else None
                        cost = maker.seconds if maker is not None and maker.lazy else 0.0
                        decisions[decision] = self._variable(cost, False, True)
                    self.alive[0][s] = decisions[decision]
                    if s in problem.never:
                        self.upper[decisions[decision]] = 0.0
            for s in sorted((self.useful[stage] & problem.remaker.keys()) - self.crumbs):
                index = problem.maker[s]
                if index not in self.rerun[stage]:
                    self.rerun[stage][index] = self._variable(problem.forward[index].again_seconds, False, False)

    def _made(self, s: int, stage: int) -> list[tuple[int, float]]:
        """Terms of "s is alive when the stage starts, or made again in it"."""
        terms = [(self.alive[stage][s], 1.0)]
        if s in self.p.remaker and self.p.maker[s] in self.rerun[stage]:
            terms.append((self.rerun[stage][self.p.maker[s]], 1.0))
        return terms

    def _add_precedence(self) -> None:
        for stage in range(len(self.cuts)):
            for s in sorted(self.read[stage] - self.crumbs):
                self.rows.add([(c, -f) for c, f in self._made(s, stage)], -1.0)
            for index, column in self.rerun[stage].items():
                for u in self.p.forward[index].again_inputs:
                    if u in self.s.wanted and u not in self.crumbs:
                        self.rows.add([(column, 1.0)] + [(c, -f) for c, f in self._made(u, stage)], 0.0)
            if stage:
                for s, column in self.alive[stage].items():
                    if self.alive[stage - 1].get(s) != column:
                        self.rows.add([(column, 1.0)] + [(c, -f) for c, f in self._made(s, stage - 1)], 0.0)

    def _add_capacity(self) -> None:
        nbytes = self.p.nbytes
        held = sum(nbytes[s] for s in self.p.held)
        for stage, cut in enumerate(self.cuts):
            beside = held if cut < 0 else self.s.fixed_bytes[cut]
            terms = [(column, float(nbytes[s])) for s, column in self.alive[stage].items()]
            self.rows.add(terms, float(self.budget - beside))
        for moment in self.forward_moments:
            self._add_forward_capacity(moment)

    def _add_forward_capacity(self, moment: int) -> None:
        """What was kept before this forward op fits beside what the forward itself holds."""
        live = 0
        terms: list[tuple[int, float]] = []
        lazy = {s for index in self.p.lazy for s in self.p.forward[index].outputs}  # these may not be made at all

        def weigh(storages: Iterable[int]) -> int:
            return sum(self.p.nbytes[s] for s in storages if s not in lazy)

        for node, deaths in zip(self.p.forward[:moment], self.p.deaths, strict=False):
            live += weigh(node.outputs) - weigh(deaths)
            terms += [(self.alive[0][s], float(self.p.nbytes[s])) for s in deaths if s in self.alive[0]]
        node, dying = self.p.forward[moment], self.p.deaths[moment]
        live += weigh(node.outputs) + (0 if node.lazy else node.working)
        live -= next((self.p.nbytes[s] for s in node.overwrites if s in dying), 0)
        self.rows.add(terms, float(self.budget - live))

    def solve(self, gap: float, seconds: float, nodes: int) -> Solution:
        # imported here: scipy takes 90 MiB, which a process that only runs a ready plan must not pay
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        rows = self.rows
        if not self.cost:  # the backward needs nothing from the forward
            fits = min(rows.limit, default=0.0) >= 0
            return Solution(set(self.crumbs) if fits else None, {}, 0.0, not fits)
        scale = 1.0 / max(*self.cost, 1e-12)
        row = np.asarray(rows.row, dtype=int)
        factor = np.asarray(rows.factor)
        # bytes and plain 0/1 rows differ by nine orders of magnitude: scale every row to its largest entry
        largest = np.ones(len(rows.limit))
        np.maximum.at(largest, row, np.abs(factor))
        shape = (len(rows.limit), len(self.cost))
        matrix = coo_array((factor / largest[row], (row, rows.column)), shape=shape).tocsr()
        result = milp(
            c=np.asarray(self.cost) * scale,
            integrality=np.asarray(self.integer),
            bounds=Bounds(np.asarray(self.lower), np.asarray(self.upper)),
            constraints=LinearConstraint(matrix, ub=np.asarray(rows.limit) / largest),
            options={"time_limit": seconds, "mip_rel_gap": gap, "node_limit": nodes},
        )
        bound = getattr(result, "mip_dual_bound", None)
        proven = 0.0 if bound is None or not np.isfinite(bound) else max(float(bound), 0.0) / scale
        if result.x is None:
            return Solution(None, {}, proven, result.status == 2)
        chosen = [{s for s, c in alive.items() if result.x[c] > 0.5} for alive in self.alive]
        without = {
            cut: set(self.p.remaker) - chosen[stage] - self.crumbs for stage, cut in enumerate(self.cuts) if cut >= 0
        }
        return Solution(chosen[0] | self.crumbs, without, proven)


def _fixed_bytes(problem: Problem) -> list[int]:
    """Bytes alive at each backward op whatever is decided: outputs held, gradients, the op's own memory."""
    tangents = {s for storages in problem.tangents.values() for s in storages}
    gradients = {s for s, m in enumerate(problem.maker) if m < 0 and s not in problem.boundary} - problem.held
    end: dict[int, int] = {}
    for last, node in zip(scope_ends(problem.backward), problem.backward, strict=True):
        for s in (*node.inputs, *node.outputs, *node.delivers):
            end[s] = last
    last_of_region = {n.region: i for i, n in enumerate(problem.backward)}
    for r, leaving in problem.leaving.items():
        for s in leaving & problem.passing | {s for s in leaving if s not in end}:
            end[s] = max(end.get(s, 0), last_of_region.get(r, 0))
    for s in problem.accumulated:
        end[s] = len(problem.backward)
    dies: dict[int, list[int]] = {}
    for s in gradients & end.keys():
        dies.setdefault(end[s], []).append(s)
    live = sum(problem.nbytes[s] for s in problem.held)
    result, region = [], -1
    for index, node in enumerate(problem.backward):
        if node.region != region:
            region = node.region
            live += sum(problem.nbytes[s] for s in problem.tangents[region])
        live += sum(problem.nbytes[s] for s in node.outputs)
        own = (s for s in node.overwrites if s in problem.remaker or (end[s] == index and s in gradients - tangents))
        result.append(live + node.working - max((problem.nbytes[s] for s in own), default=0))
        live -= sum(problem.nbytes[s] for s in dies.get(index, ()))
    return result
