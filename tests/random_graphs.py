"""Random legal graphs and their costs.

``random_graph`` draws through ``pick(low, high)``, so that Hypothesis and ``random.Random`` can both drive it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from gradstow.ir import CostTable, Op, OpCost, PlainForm, Region, Resident, StepGraph, StorageKind
from graphs import Sketch, step

Pick = Callable[[int, int], int]


@dataclass
class _Grower:
    """Grows one random region: a forward, and a backward that has the shape of its derivative."""

    pick: Pick
    sketch: Sketch
    unit: int
    encodes: bool
    pool: list[int] = field(default_factory=list)
    grads: dict[int, int] = field(default_factory=dict)
    made: int = 0
    decoded: dict[int, int] = field(default_factory=dict)

    def chance(self, percent: int) -> bool:
        return self.pick(1, 100) > 100 - percent

    def size(self) -> int:
        return self.unit * self.pick(1, 4) + (self.pick(0, 3) if self.unit < 1024 else 0)

    def some(self, values: Sequence[int], most: int) -> list[int]:
        """Up to ``most`` of the values, the last ones more often."""
        chosen: list[int] = []
        for _ in range(min(most, len(values))):
            back = min(self.pick(0, len(values) - 1), self.pick(0, len(values) - 1))
            value = values[len(values) - 1 - back]
            if value not in chosen:
                chosen.append(value)
        return chosen

    def name(self, kind: str) -> str:
        self.made += 1
        return f"{kind}{self.made}"

    # -- forward

    def forward(self, ops: int) -> None:
        s = self.sketch
        for _ in range(ops):
            sources = self.some(self.pool, self.pick(1, 2))
            if self.chance(50):
                sources = list(dict.fromkeys([self.pool[-1], *sources]))
            kinds = (self._plain, self._plain, self._plain, self._elementwise, self._elementwise, self._several)
            kind = [*kinds, self._view, self._pinned, self._again][self.pick(0, 8)]
            made = kind(s, sources)
            self.pool += made
            if self.encodes and kind != self._view and self.chance(20):
                self._encode(s, made[0])

    def _encode(self, s: Sketch, value: int) -> None:
        """Something smaller of a value, and a value again of that, for the backward to read in its place."""
        (code,) = s.op(self.name("encode"), (value,), (self.size() // 2,), lazy=True)
        (self.decoded[value],) = s.op(self.name("decode"), (code,), (s.nbytes(value),), lazy=True)

    def _plain(self, s: Sketch, sources: list[int]) -> tuple[int, ...]:
        return s.op(self.name("op"), sources, (self.size(),))

    def _elementwise(self, s: Sketch, sources: list[int]) -> tuple[int, ...]:
        size = s.nbytes(sources[0])
        over = tuple(v for v in sources if s.nbytes(v) == size)
        return s.op(self.name("elementwise"), sources, (size,), overwrites=over)

    def _several(self, s: Sketch, sources: list[int]) -> tuple[int, ...]:
        return s.op(self.name("several"), sources, [self.size() for _ in range(self.pick(2, 3))])

    def _view(self, s: Sketch, sources: list[int]) -> tuple[int, ...]:
        return (s.view(sources[0], self.name("view")),)

    def _pinned(self, s: Sketch, sources: list[int]) -> tuple[int, ...]:
        return s.op(self.name("pinned"), sources, (self.size(),), pinned="draws random numbers")

    def _again(self, s: Sketch, sources: list[int]) -> tuple[int, ...]:
        form = self.pick(0, 2)
        again = (((sources[0], -2, -3), (0,)), ((sources[0],), (0, 1, 2)), (tuple(sources), (0, 1)))[form]
        sizes = (self.size(), self.size(), self.size())
        return s.op(self.name("norm"), sources, sizes, again=again)

    # -- backward

    def backward(self, outputs: Sequence[int]) -> tuple[bool, ...]:
        """Returns the tangent mask."""
        s = self.sketch
        forward = list(s.ops)
        targets = [v for v in outputs if v >= 0 and s.kind(v) is StorageKind.ACTIVATION]
        mask = [self.chance(80) for _ in targets]
        if targets and not any(mask):
            mask[-1] = not self.chance(10)
        for v, arrives in zip(targets, mask, strict=True):
            if arrives:
                self._give(v, s.tangent(s.nbytes(v)))
        for op in reversed(forward):
            arriving = list(dict.fromkeys(self.grads[v] for v in op.outputs if v in self.grads))
            if arriving:
                self._derive(op, arriving)
        if s.tangents and self.chance(20):
            s.view(s.tangents[0], self.name("unread"), backward=True)
        return tuple(mask)

    def _derive(self, op: Op, arriving: list[int]) -> None:
        s = self.sketch
        targets = [v for v in op.inputs if s.kind(v) is not StorageKind.RESIDENT or self.chance(70)]
        if op.view:
            for v in targets:
                self._give(v, s.view(arriving[0], self.name("bview"), backward=True))
            return
        saved = self.some([*self.pool, *op.inputs, *op.outputs], self.pick(0, 3))
        saved = [s.view(v, self.name("bview"), backward=True) if self.chance(20) else v for v in saved]
        if saved and self.chance(10):
            saved += s.op(self.name("formula"), saved[:1], (self.size(),), backward=True)
        if not targets:
            return
        if self.chance(25):
            made = s.op(self.name("back"), (*arriving, *saved), [s.nbytes(v) for v in targets], backward=True)
            for v, grad in zip(targets, made, strict=True):
                self._give(v, grad)
            return
        for v in targets:
            same = [g for g in arriving if s.nbytes(g) == s.nbytes(v)]
            if same and self.chance(15):
                self._give(v, same[0])
                continue
            over = tuple(same) if self.chance(50) else ()
            name, plain = self.name("back"), None
            if any(u in self.decoded for u in saved):
                plain = PlainForm((*arriving, *saved), f"{s.name} {name}")
            reads = (*arriving, *(self.decoded.get(u, u) for u in saved))
            self._give(v, *s.op(name, reads, (s.nbytes(v),), backward=True, overwrites=over, plain=plain))

    def _give(self, value: int, grad: int) -> None:
        """One more gradient for a value: the first as it is, later ones added."""
        s, before = self.sketch, self.grads.get(value)
        if before is None or before == grad:
            self.grads[value] = grad
            return
        over = tuple(g for g in (before, grad) if s.nbytes(g) == s.nbytes(value))
        (total,) = s.op(self.name("add"), (before, grad), (s.nbytes(value),), backward=True, overwrites=over)
        self.grads[value] = total

    def gradients(self) -> dict[int, int]:
        return {v: self.grads[v] for v in self.sketch.inputs if v in self.grads}


def _grow(
    pick: Pick, before: Sequence[Region], ops: int, unit: int, *, plain_sizes: bool, encodes: bool = True
) -> Region:
    """One more region after ``before``, reading outputs of earlier ones."""
    s = Sketch(f"region {len(before)}")
    g = _Grower(pick, s, unit, encodes)
    g.pool = [s.resident(g.size()) for _ in range(pick(1, 2))]
    for r, region in enumerate(before):
        crossing = {region.values[v].storage for v in region.outputs if v >= 0}
        for storage in sorted(crossing):
            item = region.storages[storage]
            if item.kind is StorageKind.ACTIVATION and (r == len(before) - 1 or g.chance(30)):
                g.pool.append(s.boundary(item.nbytes, (r, storage)))
    g.forward(pick(1, ops))
    last = next((v for v in reversed(g.pool) if s.kind(v) is StorageKind.ACTIVATION), g.pool[-1])
    outputs = list(dict.fromkeys([*(v for v in g.pool if g.chance(12)), last]))
    mask = g.backward(outputs)
    if plain_sizes:
        for i, item in enumerate(s.storages):
            if item.kind is StorageKind.ACTIVATION and g.chance(20):
                s.storages[i] = replace(item, plain_nbytes=g.size())
    return s.done([*outputs, -1] if g.chance(10) else outputs, g.gradients(), tangent_mask=mask)


def random_graph(
    pick: Pick, *, regions: int = 1, ops: int = 7, unit: int = 100, loss: bool = True, plain_sizes: bool = True
) -> StepGraph:
    """A legal graph of up to so many regions of up to so many forward ops each."""
    grown: list[Region] = []
    for _ in range(pick(1, regions)):
        grown.append(_grow(pick, grown, ops, unit, plain_sizes=plain_sizes))
    outputs_held, last = bool(pick(0, 1)), len(grown) - 1
    if loss and regions > 1 and pick(0, 1):
        region = _grow(pick, grown, 2, unit, plain_sizes=False, encodes=False)
        grown.append(replace(region, name="loss", managed=False, ops=_scoped(pick, region.ops)))
    grown = [replace(r, held=outputs_held and i >= last) for i, r in enumerate(grown)]
    return step(
        *grown,
        outputs_held=outputs_held,
        reserve_bytes=pick(0, 1) * unit * pick(1, 6),
        outside_bytes=pick(0, 1) * unit,
        grads_exist=bool(pick(0, 1)),
        resident=Resident(parameters=pick(0, 9) * unit),
    )


def _scoped(pick: Pick, ops: Sequence[Op]) -> tuple[Op, ...]:
    """One call holds the forward's values until it returns; several hold the backward's."""
    scopes, scope = [], 0
    for op in ops:
        scope += op.backward and (scope == 0 or bool(pick(0, 1)))
        scopes.append(scope)
    return tuple(replace(op, scope=scope) for op, scope in zip(ops, scopes, strict=True))


def random_costs(pick: Pick, graph: StepGraph, *, unit: int = 100) -> CostTable:
    """A cost for every signature: 1 to 100 ms, some with working memory."""
    table: dict[str, OpCost] = {}
    for region in graph.regions:
        for op in region.ops:
            other = ["" if form is None else form.signature for form in (op.rerun, op.plain)]
            for signature in (op.signature, *other):
                if signature:
                    table[signature] = OpCost(pick(1, 100) / 1000, max(pick(-4, 4), 0) * unit)
    return CostTable(table, "cpu", 1)


@st.composite
def graphs_and_costs(draw: st.DrawFn, **limits: Any) -> tuple[StepGraph, CostTable]:
    """Strategy: a random legal graph with its costs; ``limits`` as for ``random_graph``."""
    pick = _picker(draw)
    graph = random_graph(pick, **limits)
    return graph, random_costs(pick, graph, unit=limits.get("unit", 100))


def _picker(draw: st.DrawFn) -> Pick:
    return lambda low, high: draw(st.integers(low, high))
