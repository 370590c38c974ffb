"""The knapsack with precedence: which storages to keep, which ops to rerun, as an integer program.

Every value that the backward needs is kept or made again; an op that runs again needs each of its inputs
kept or made again; at each moment in the list the bytes alive must fit. The objective is the seconds of
the reruns. At the start of the backward the constraint holds for any plan, whatever its order: solved with
that moment alone the program's bound is a proven lower bound on the added time. Moments inside the backward
describe the just-in-time rule of ``planner/_evaluate``: a storage that is made again lives from its first
need to its last, and its first need comes early where another rerun reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gradstow.planner._problem import Problem, scope_ends


@dataclass(slots=True)
class Solution:
    """``kept`` is None where the program is infeasible or ran out of work; ``bound`` holds in any case."""

    kept: set[int] | None
    bound: float


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


class Knapsack:
    """The program of one problem. Build once, solve for several budgets and sets of moments."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.order = list(problem.backward)
        self.first, self.last = self._own_uses()
        self.consumers = self._consumers()
        self.wanted = self._wanted()
        self.latest = {s: self._latest(s) for s in self.wanted}
        self.fixed = self._fixed_bytes()

    def solve(self, budget: int, moments: dict[int, int], *, seconds: float = 10.0, gap: float = 0.005) -> Solution:
        """Best kept set whose bytes fit ``budget`` at the start of the backward and at ``moments``.

        ``moments`` maps a moment to the bytes to leave free there. Moments from 0 up are backward ops;
        a negative moment ``-1 - i`` is forward op ``i``.
        """
        program = _Program(self, budget)
        program.add_start()
        for moment, spare in moments.items():
            if moment >= 0:
                program.add_moment(moment, spare)
            else:
                program.add_forward_moment(-1 - moment, spare)
        return program.solve(seconds, gap)

    def _own_uses(self) -> tuple[dict[int, int], dict[int, int]]:
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for index, node in enumerate(self.order):
            for s in node.inputs:
                first.setdefault(s, index)
                last[s] = index
        return first, last

    def _consumers(self) -> dict[int, list[int]]:
        """Storage → indices of forward nodes whose rerun reads it."""
        result: dict[int, list[int]] = {}
        for index, node in enumerate(self.problem.forward):
            if not node.pinned:
                for s in node.again_inputs:
                    result.setdefault(s, []).append(index)
        return result

    def _wanted(self) -> list[int]:
        """Forward storages that the backward reads, and all that remaking them could read."""
        problem = self.problem
        todo = [s for s in self.first if problem.maker[s] >= 0 or s in problem.boundary]
        seen: dict[int, None] = dict.fromkeys(todo)
        while todo:
            s = todo.pop()
            if not self.can_rerun(s):
                continue
            for u in problem.forward[problem.maker[s]].again_inputs:
                if u not in seen:
                    seen[u] = None
                    todo.append(u)
        return [s for s in seen if s not in problem.held]

    def can_rerun(self, s: int) -> bool:
        problem = self.problem
        if problem.maker[s] < 0 or s in problem.boundary or s in problem.always:
            return False
        node = problem.forward[problem.maker[s]]
        return not node.pinned and s in node.again_outputs

    def _latest(self, s: int, depth: int = 0) -> int:
        """Index of the last moment at which a kept ``s`` can be needed."""
        moments = [self.last.get(s, -1)]
        for index in self.consumers.get(s, ()):
            for made in self.problem.forward[index].again_outputs:
                if made in self.first:
                    moments.append(self.first[made])
                elif depth < 50:
                    moments.append(self._latest(made, depth + 1))
        return max(moments)

    def _fixed_bytes(self) -> list[int]:
        """Bytes alive at each backward op whatever is decided: outputs held, gradients, the op's own memory."""
        problem = self.problem
        tangents = {s for storages in problem.tangents.values() for s in storages}
        gradients = {s for s, m in enumerate(problem.maker) if m < 0 and s not in problem.boundary} - problem.held
        end: dict[int, int] = {}
        for last, node in zip(scope_ends(self.order), self.order, strict=True):
            for s in (*node.inputs, *node.outputs):
                end[s] = last
        last_of_region = {n.region: i for i, n in enumerate(self.order)}
        for r, leaving in problem.leaving.items():
            for s in leaving & problem.passing | {s for s in leaving if s not in end}:
                end[s] = max(end.get(s, 0), last_of_region.get(r, 0))
        for s in problem.accumulated:
            end[s] = len(self.order)
        dies: dict[int, list[int]] = {}
        for s in gradients & end.keys():
            dies.setdefault(end[s], []).append(s)
        live = sum(problem.nbytes[s] for s in problem.held)
        result, region = [], -1
        for index, node in enumerate(self.order):
            if node.region != region:
                region = node.region
                live += sum(problem.nbytes[s] for s in problem.tangents[region])
            live += sum(problem.nbytes[s] for s in node.outputs)
            own = (s for s in node.overwrites if end[s] == index and s in gradients and s not in tangents)
            result.append(live + node.working - next((problem.nbytes[s] for s in own), 0))
            live -= sum(problem.nbytes[s] for s in dies.get(index, ()))
        return result


class _Program:
    """One instance of the integer program: variables keep[decision], rerun[node], early[storage, moment]."""

    def __init__(self, knapsack: Knapsack, budget: int) -> None:
        self.k, self.p = knapsack, knapsack.problem
        self.budget = budget - self.p.graph.outside_bytes
        self.columns = 0
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.cost: list[float] = []
        self.integer: list[int] = []
        self.rows = _Rows()
        self.keep: dict[int, int] = {}
        self.rerun: dict[int, int] = {}
        self._make_variables()
        self._add_precedence()

    def _variable(self, cost: float, lower: float, integer: bool) -> int:
        self.lower.append(lower)
        self.upper.append(1.0)
        self.cost.append(cost)
        self.integer.append(int(integer))
        self.columns += 1
        return self.columns - 1

    def _make_variables(self) -> None:
        tiny = max(self.budget // 20000, 1024)
        for s in self.k.wanted:
            decision = self.p.decision[s]
            if decision not in self.keep:
                must = (not self.k.can_rerun(s) and s in self.k.first) or s in self.p.always
                small = self.p.nbytes[s] <= tiny and s in self.k.first
                self.keep[decision] = self._variable(0.0, float(must or small), True)
        for s in self.k.wanted:
            if self.k.can_rerun(s):
                index = self.p.maker[s]
                if index not in self.rerun:
                    self.rerun[index] = self._variable(self.p.forward[index].again_seconds, 0.0, False)

    def _made(self, s: int) -> list[tuple[int, float]]:
        """Terms of "s is kept or made again"."""
        terms = [(self.keep[self.p.decision[s]], 1.0)]
        if self.k.can_rerun(s):
            terms.append((self.rerun[self.p.maker[s]], 1.0))
        return terms

    def _add_precedence(self) -> None:
        for s in self.k.wanted:
            if s in self.k.first:
                self.rows.add([(c, -f) for c, f in self._made(s)], -1.0)
        for index, column in self.rerun.items():
            for u in self.p.forward[index].again_inputs:
                if u in self.p.held:
                    continue
                self.rows.add([(column, 1.0)] + [(c, -f) for c, f in self._made(u)], 0.0)

    def add_start(self) -> None:
        """What is kept, and what the caller holds, fits at the end of the forward."""
        held = sum(self.p.nbytes[s] for s in self.p.held)
        terms = [(self.keep[self.p.decision[s]], float(self.p.nbytes[s])) for s in self.k.wanted]
        self.rows.add(terms, float(self.budget - held))

    def add_forward_moment(self, moment: int, spare: int) -> None:
        """What was kept before this forward op fits beside what the forward itself holds."""
        live = 0
        wanted = set(self.k.wanted)
        terms: list[tuple[int, float]] = []
        for index, node in enumerate(self.p.forward[: moment + 1]):
            live += sum(self.p.nbytes[s] for s in node.outputs)
            if index == moment:
                dying = self.p.deaths[index]
                live += node.working - next((self.p.nbytes[s] for s in node.overwrites if s in dying), 0)
                break
            for s in self.p.deaths[index]:
                live -= self.p.nbytes[s]
                if s in wanted:
                    terms.append((self.keep[self.p.decision[s]], float(self.p.nbytes[s])))
        self.rows.add(terms, float(self.budget - spare - live))

    def add_moment(self, moment: int, spare: int) -> None:
        """Kept and remade storages alive at this backward op fit beside what is alive anyway."""
        terms: list[tuple[int, float]] = []
        early: dict[int, int] = {}
        region = self.k.order[moment].region
        for s in self.k.wanted:
            size = float(self.p.nbytes[s])
            if self.k.latest[s] < moment:
                continue
            terms.append((self.keep[self.p.decision[s]], size))
            if not self.k.can_rerun(s) or self.p.forward[self.p.maker[s]].region != region:
                continue
            if self.k.last.get(s, -1) < moment:
                continue  # only other reruns read it, and then it is gone at once
            if self.k.first[s] <= moment:
                terms.append((self.rerun[self.p.maker[s]], size))
            else:
                terms.append((self._early(s, moment, early), size))
        self.rows.add(terms, float(self.budget - spare - self.k.fixed[moment]))

    def _early(self, s: int, moment: int, early: dict[int, int]) -> int:
        """Variable: s is made again before this moment because another rerun reads it."""
        if s in early:
            return early[s]
        column = self._variable(0.0, 0.0, False)
        early[s] = column
        for index in self.k.consumers.get(s, ()):
            for made in self.p.forward[index].again_outputs:
                if made not in self.k.latest or index not in self.rerun:
                    continue
                cause = (
                    self.rerun[index]
                    if self.k.first.get(made, moment + 1) <= moment
                    else self._early(made, moment, early)
                )
                self.rows.add([(cause, 1.0), (column, -1.0), (self.keep[self.p.decision[s]], -1.0)], 0.0)
        return column

    def solve(self, seconds: float, gap: float) -> Solution:
        # imported here: scipy takes 90 MiB, which a process that only runs a ready plan must not pay
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        rows = self.rows
        if not self.columns:  # the backward needs nothing from the forward
            return Solution(set() if min(rows.limit, default=0.0) >= 0 else None, 0.0)
        scale = 1.0 / max(*self.cost, 1e-12)
        factor = np.asarray(rows.factor)
        limit = np.asarray(rows.limit)
        # bytes and plain 0/1 rows differ by nine orders of magnitude: scale every row to its largest entry
        largest = np.ones(len(limit))
        np.maximum.at(largest, np.asarray(rows.row, dtype=int), np.abs(factor))
        factor = factor / largest[np.asarray(rows.row, dtype=int)]
        matrix = coo_array((factor, (rows.row, rows.column)), shape=(len(limit), self.columns)).tocsr()
        result = milp(
            c=np.asarray(self.cost) * scale,
            integrality=np.asarray(self.integer),
            bounds=Bounds(np.asarray(self.lower), np.asarray(self.upper)),
            constraints=LinearConstraint(matrix, ub=limit / largest),
            options={"time_limit": seconds, "mip_rel_gap": gap},
        )
        bound = getattr(result, "mip_dual_bound", None)
        lower = 0.0 if bound is None or not np.isfinite(bound) else float(bound) / scale
        if result.x is None:
            return Solution(None, lower)
        chosen = {d for d, column in self.keep.items() if result.x[column] > 0.5}
        kept = {s for s in self.k.wanted if self.p.decision[s] in chosen}
        return Solution(kept, lower)
