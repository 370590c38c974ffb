"""Step graphs without tensors: a sketch pad, and small hand-made graphs (``random_graphs`` has random ones)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gradstow.ir import (
    CostTable,
    Deliver,
    Event,
    Free,
    Op,
    OpCost,
    PlainForm,
    Region,
    Rerun,
    Resident,
    Run,
    StepGraph,
    Storage,
    StorageKind,
    Value,
    check_graph,
)

MIB = 2**20


@dataclass
class Sketch:
    """One region, written op by op; every method returns value ids."""

    name: str = "region 0"
    storages: list[Storage] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    tangents: list[int] = field(default_factory=list)

    def value(self, storage: int, name: str = "") -> int:
        name = name or f"v{len(self.values)}"
        self.values.append(Value(name, storage, (self.storages[storage].nbytes,), "uint8"))
        return len(self.values) - 1

    def new(self, nbytes: int, kind: StorageKind, name: str = "", **fields: Any) -> int:
        self.storages.append(Storage(nbytes, kind, **fields))
        return self.value(len(self.storages) - 1, name)

    def resident(self, nbytes: int = MIB, name: str = "") -> int:
        self.inputs.append(self.new(nbytes, StorageKind.RESIDENT, name))
        return self.inputs[-1]

    def boundary(self, nbytes: int, origin: tuple[int, int], name: str = "") -> int:
        self.inputs.append(self.new(nbytes, StorageKind.BOUNDARY, name, origin=origin))
        return self.inputs[-1]

    def tangent(self, nbytes: int = MIB, name: str = "") -> int:
        self.tangents.append(self.new(nbytes, StorageKind.TANGENT, name))
        return self.tangents[-1]

    def op(self, name: str, inputs: Sequence[int], sizes: Sequence[int], **fields: Any) -> tuple[int, ...]:
        """An op that makes one new storage per size. ``again=(inputs, outputs)``: positions, -1-i for own output i."""
        backward = fields.setdefault("backward", False)
        kind = StorageKind.GRADIENT if backward else StorageKind.ACTIVATION
        outputs = tuple(self.new(n, kind, name if len(sizes) == 1 else f"{name}.{i}") for i, n in enumerate(sizes))
        again = fields.pop("again", None)
        if again is not None:
            reads = tuple(outputs[-1 - v] if v < 0 else v for v in again[0])
            made = tuple(outputs[i] for i in again[1])
            fields["rerun"] = Rerun(f"{name} again", reads, made, f"{self.name} {name} again")
        signature = f"{self.name} {name}"
        self.ops.append(Op(name, name, tuple(inputs), outputs, signature=signature, **fields))
        return outputs

    def view(self, source: int, name: str = "", *, backward: bool = False) -> int:
        name = name or f"view{len(self.ops)}"
        made = self.value(self.values[source].storage, name)
        self.ops.append(Op(name, "view", (source,), (made,), backward=backward, view=True))
        return made

    def constant(self, nbytes: int, name: str = "") -> int:
        """What the graph itself holds: a view of nothing, there whenever it is asked for."""
        made = self.new(nbytes, StorageKind.RESIDENT, name)
        self.ops.append(Op(name, "constant", (), (made,), view=True))
        return made

    def nbytes(self, value: int) -> int:
        return self.storages[self.values[value].storage].nbytes

    def kind(self, value: int) -> StorageKind:
        return self.storages[self.values[value].storage].kind

    def done(self, outputs: Sequence[int], gradients: Mapping[int, int], **fields: Any) -> Region:
        """The region; ``gradients`` maps inputs to their gradients; those of residents end in ``.grad``."""
        accumulated = tuple(v in gradients and self.kind(v) is StorageKind.RESIDENT for v in self.inputs)
        return Region(
            name=self.name,
            storages=tuple(self.storages),
            values=tuple(self.values),
            ops=tuple(self.ops),
            inputs=tuple(self.inputs),
            outputs=tuple(outputs),
            tangents=tuple(self.tangents),
            gradients=tuple(gradients.get(v, -1) for v in self.inputs),
            **{
                "tangent_mask": (True,) * len(self.tangents),
                "accumulated": accumulated,
                "added": (False,) * len(accumulated),
                **fields,
            },
        )


def step(*regions: Region, **fields: Any) -> StepGraph:
    """A legal StepGraph; the caller holds no outputs unless told otherwise."""
    fields.setdefault("outputs_held", any(r.held for r in regions))
    if fields.pop("grads_exist", False):
        regions = tuple(replace(r, added=r.accumulated) for r in regions)
    graph = StepGraph(regions, fields.pop("resident", Resident()), **fields)
    check_graph(graph)
    return graph


def costs_of(
    graph: StepGraph, seconds: Mapping[str, float] | None = None, working: Mapping[str, int] | None = None
) -> CostTable:
    """One second per op and no working memory, or what is given by op name ("bn", "bn again")."""
    table: dict[str, OpCost] = {}
    for region in graph.regions:
        for op in region.ops:
            for name, signature in ((op.name, op.signature), (f"{op.name} again", op.rerun and op.rerun.signature)):
                if signature:
                    table[signature] = OpCost((seconds or {}).get(name, 1.0), (working or {}).get(name, 0))
    return CostTable(table, "cpu", 1)


def script(region: Region, text: str) -> tuple[Event, ...]:
    """Events by name: ``f`` runs op f, ``relu<f`` lets it take over value f, ``-f`` frees value f's storage,
    ``^w,v`` delivers the gradients of the inputs w and v."""
    ops = {op.name: i for i, op in enumerate(region.ops)}
    values = {v.name: i for i, v in enumerate(region.values)}
    events: list[Event] = []
    for word in text.split():
        name, _, taken = word.partition("<")
        if word.startswith("-"):
            events.append(Free(region.values[values[word[1:]]].storage))
        elif word.startswith("^"):
            events.append(Deliver(tuple(region.inputs.index(values[name]) for name in word[1:].split(","))))
        else:
            events.append(Run(ops[name], values[taken] if taken else -1))
    return tuple(events)


def storages_of(region: Region, *names: str) -> tuple[int, ...]:
    """Storage ids by the names of values on them."""
    found = {v.name: v.storage for v in region.values}
    return tuple(found[name] for name in names)


def with_region(graph: StepGraph, r: int, **fields: Any) -> StepGraph:
    """The graph with some fields of one region changed; not checked."""
    regions = list(graph.regions)
    regions[r] = replace(regions[r], **fields)
    return replace(graph, regions=tuple(regions))


def with_op(graph: StepGraph, r: int, name: str, **fields: Any) -> StepGraph:
    """The graph with some fields of one op changed; not checked."""
    ops = tuple(replace(op, **fields) if op.name == name else op for op in graph.regions[r].ops)
    return with_region(graph, r, ops=ops)


def with_storage(graph: StepGraph, r: int, storage: int, **fields: Any) -> StepGraph:
    """The graph with some fields of one storage changed; not checked."""
    storages = list(graph.regions[r].storages)
    storages[storage] = replace(storages[storage], **fields)
    return with_region(graph, r, storages=tuple(storages))


# ------------------------------------------------------------------------------------- hand-made


def chain(length: int = 3, size: int = MIB) -> StepGraph:
    """x → f1 → … → fn; the backward of each reads its input and its weight, as a linear layer's does."""
    s = Sketch()
    x = s.resident(size, "x")
    weights = [s.resident(size, f"w{i + 1}") for i in range(length)]
    acts = [x]
    for i, w in enumerate(weights):
        acts += s.op(f"f{i + 1}", (acts[-1], w), (size,))
    grad = s.tangent(size, "t")
    gradients: dict[int, int] = {}
    for i in reversed(range(length)):
        sizes = (size, size) if i else (size,)
        *rest, gradients[weights[i]] = s.op(f"b{i + 1}", (grad, acts[i], weights[i]), sizes, backward=True)
        grad = rest[0] if rest else grad
    return step(s.done(acts[-1:], gradients))


def elementwise(size: int = MIB) -> StepGraph:
    """x → f → relu → g; relu may write over f, and its gradient over the one that arrives."""
    s = Sketch()
    x, w = s.resident(size, "x"), s.resident(size, "w")
    (f,) = s.op("f", (x, w), (size,))
    (relu,) = s.op("relu", (f,), (size,), overwrites=(f,))
    (g,) = s.op("g", (relu, w), (size,))
    t = s.tangent(size, "t")
    (bg,) = s.op("bg", (t, w), (size,), backward=True)
    (brelu,) = s.op("brelu", (bg, relu), (size,), backward=True, overwrites=(bg,))
    (bf,) = s.op("bf", (brelu, x), (size,), backward=True)
    return step(s.done((g,), {w: bf}))


def viewed(size: int = MIB) -> StepGraph:
    """x → f → view → g; the backward of g reads the view."""
    s = Sketch()
    x, w = s.resident(size, "x"), s.resident(size, "w")
    (f,) = s.op("f", (x, w), (size,))
    seen = s.view(f, "seen")
    (g,) = s.op("g", (seen, w), (size,))
    t = s.tangent(size, "t")
    (bg, bw) = s.op("bg", (t, seen, w), (size, size), backward=True)
    flat = s.view(bw, "flat", backward=True)
    (bf,) = s.op("bf", (bg, x), (size,), backward=True)
    (total,) = s.op("add", (bf, flat), (size,), backward=True, overwrites=(bf,))
    return step(s.done((g,), {w: total}))


def diamond(size: int = MIB) -> StepGraph:
    """x → f → (g, h) → sum; both branches read f again in the backward."""
    s = Sketch()
    x, w = s.resident(size, "x"), s.resident(size, "w")
    (f,) = s.op("f", (x, w), (size,))
    (g,) = s.op("g", (f,), (2 * size,))
    (h,) = s.op("h", (f,), (2 * size,))
    (total,) = s.op("sum", (g, h), (size,))
    t = s.tangent(size, "t")
    (bh,) = s.op("bh", (t, h, f), (size,), backward=True)
    (bg,) = s.op("bg", (t, g, f), (size,), backward=True)
    (both,) = s.op("add", (bg, bh), (size,), backward=True, overwrites=(bg, bh))
    (bf,) = s.op("bf", (both, x), (size,), backward=True)
    return step(s.done((total,), {w: bf}))


def multi_output(size: int = MIB) -> StepGraph:
    """x → pool (values and indices) → g; the backward reads the indices only."""
    s = Sketch()
    x, w = s.resident(size, "x"), s.resident(size, "w")
    (f,) = s.op("f", (x, w), (4 * size,))
    pooled, indices = s.op("pool", (f,), (size, 2 * size))
    (g,) = s.op("g", (pooled, w), (size,))
    t = s.tangent(size, "t")
    (bg,) = s.op("bg", (t, w), (size,), backward=True)
    (bpool,) = s.op("bpool", (bg, indices), (4 * size,), backward=True)
    (bf,) = s.op("bf", (bpool, x), (size,), backward=True)
    return step(s.done((g,), {w: bf}))


def batch_norm(size: int = MIB) -> StepGraph:
    """x → f → bn (output, mean, deviation; writes its buffer) → g; bn is made again from f and its statistics."""
    s = Sketch()
    x, w, running = s.resident(size, "x"), s.resident(size, "w"), s.resident(64, "running")
    (f,) = s.op("f", (x, w), (size,))
    y, mean, deviation = s.op(
        "bn", (f, running), (size, 64, 64), writes=(s.values[running].storage,), again=((f, -2, -3), (0,))
    )
    (g,) = s.op("g", (y, w), (size,))
    t = s.tangent(size, "t")
    bg, bw = s.op("bg", (t, y, w), (size, size), backward=True)
    (bbn,) = s.op("bbn", (bg, f, mean, deviation), (size,), backward=True)
    (bf,) = s.op("bf", (bbn, x), (size,), backward=True)
    (total,) = s.op("add", (bw, bf), (size,), backward=True)
    return step(s.done((g,), {w: total}))


def dropout(size: int = MIB) -> StepGraph:
    """x → f → (random mask) mul → g; the backward reads the mask and the product."""
    s = Sketch()
    x, w = s.resident(size, "x"), s.resident(size, "w")
    (f,) = s.op("f", (x, w), (size,))
    (mask,) = s.op("bernoulli", (f,), (size // 4,), pinned="draws random numbers")
    (mul,) = s.op("mul", (f, mask), (size,), overwrites=(f,))
    (g,) = s.op("g", (mul, w), (size,))
    t = s.tangent(size, "t")
    bg, bw = s.op("bg", (t, mul, w), (size, size), backward=True)
    (bmul,) = s.op("bmul", (bg, mask), (size,), backward=True, overwrites=(bg,))
    (bf,) = s.op("bf", (bmul, x), (size,), backward=True)
    (total,) = s.op("add", (bw, bf), (size,), backward=True, overwrites=(bw, bf))
    return step(s.done((g,), {w: total}))


def two_regions_and_loss(size: int = MIB, *, held: bool = True) -> StepGraph:
    """Two managed regions of two ops each, the second reading the first's output, and a loss outside the model."""
    first = Sketch("region 0")
    x, w = first.resident(size, "x"), first.resident(size, "w")
    (f,) = first.op("f", (x, w), (size,))
    (g,) = first.op("g", (f,), (size,))
    t = first.tangent(size, "t")
    (bg,) = first.op("bg", (t, f), (size,), backward=True)
    (bf,) = first.op("bf", (bg, x), (size,), backward=True)
    one = first.done((g,), {w: bf})

    second = Sketch("region 1")
    g1, v = second.boundary(size, (0, first.values[g].storage), "g"), second.resident(size, "v")
    (h,) = second.op("h", (g1, v), (size,))
    (k,) = second.op("k", (h,), (3 * size,))
    t = second.tangent(3 * size, "t")
    (bk,) = second.op("bk", (t, h), (size,), backward=True)
    bg1, bv = second.op("bh", (bk, g1, v), (size, size), backward=True)
    two = second.done((k,), {g1: bg1, v: bv}, held=held)

    loss = Sketch("loss")
    k2 = loss.boundary(3 * size, (1, second.values[k].storage), "k")
    (soft,) = loss.op("softmax", (k2,), (3 * size,))
    (mean,) = loss.op("mean", (soft,), (4,))
    t = loss.tangent(4, "t")
    (bmean,) = loss.op("bmean", (t, soft), (3 * size,), backward=True)
    (bsoft,) = loss.op("bsoftmax", (bmean, soft), (3 * size,), backward=True, overwrites=(bmean,))
    three = loss.done((mean,), {k2: bsoft}, held=held, managed=False)
    return step(one, two, three)


def passed_on(size: int = MIB) -> StepGraph:
    """two_regions_and_loss() where region 1 hands out what it got too, and v was made in between, by no graph."""
    graph = replace(two_regions_and_loss(size, held=False), outputs_held=True)
    one = graph.regions[1]
    return with_region(graph, 1, outputs=(*one.inputs[:1], *one.outputs), accumulated=(False, False))


def read_twice(size: int = MIB) -> StepGraph:
    """The backward reads a as a view and as itself, with b between: what is made again first depends on that."""
    s = Sketch()
    x, w = s.resident(size, "x"), s.resident(size, "w")
    (a,) = s.op("a", (x,), (size,))
    (b,) = s.op("b", (w,), (3 * size,))
    (out,) = s.op("out", (a, b), (size,))
    t = s.tangent(size, "t")
    seen = s.view(a, "seen", backward=True)
    (back,) = s.op("back", (t, seen, b, a), (size,), backward=True)
    return step(s.done((out,), {w: back}))


def scaled(size: int = MIB) -> StepGraph:
    """x → f, which reads a constant → g; both backwards read the constant, one of them as a view."""
    s = Sketch()
    x, w = s.resident(size, "x"), s.resident(size, "w")
    table = s.constant(4 * size, "table")
    (f,) = s.op("f", (x, table), (size,))
    (g,) = s.op("g", (f, w), (size,))
    t = s.tangent(size, "t")
    (bg,) = s.op("bg", (t, f, table), (size,), backward=True)
    flat = s.view(table, "flat", backward=True)
    (bf,) = s.op("bf", (bg, x, flat), (size,), backward=True)
    return step(s.done((g,), {w: bf}))


def coded(size: int = MIB) -> StepGraph:
    """x → f → g; the backward reads f as decoded from something an eighth of its size, where plain reads f itself."""
    s = Sketch()
    x, w = s.resident(size, "x"), s.resident(size, "w")
    (f,) = s.op("f", (x,), (size,))
    (code,) = s.op("encode", (f,), (size // 8,), lazy=True)
    (decoded,) = s.op("decode", (code,), (size,), lazy=True)
    (g,) = s.op("g", (f, w), (size,))
    t = s.tangent(size, "t")
    plain = PlainForm((t, f), "region 0 bg")
    (bg,) = s.op("bg", (t, decoded), (size,), backward=True, plain=plain)
    (bf,) = s.op("bf", (bg, x), (size,), backward=True)
    return step(s.done((g,), {w: bf}))


def kept_as_code(size: int = MIB) -> StepGraph:
    """x → f → g → h, all read by the backward; of g only a code is kept, from which it is made again."""
    s = Sketch()
    x, w = s.resident(size, "x"), s.resident(size, "w")
    (f,) = s.op("f", (x,), (size,))
    (g,) = s.op("g", (f, w), (size,))
    (code,) = s.op("encode", (g,), (size // 8,), lazy=True, pinned="draws random numbers")
    s.ops[1] = replace(s.ops[1], rerun=Rerun("decode", (code,), (g,), "region 0 g again", "int4"))
    (h,) = s.op("h", (g,), (size,))
    t = s.tangent(size, "t")
    (bh,) = s.op("bh", (t, g), (size,), backward=True)
    (bg,) = s.op("bg", (bh, f, w), (size,), backward=True)
    (bf,) = s.op("bf", (bg, x), (size,), backward=True)
    return step(s.done((h,), {w: bf}))


def shared_gradient(size: int = MIB) -> StepGraph:
    """A gradient that is handed out and also added to another one: it may not be written over."""
    s = Sketch()
    x, y = s.resident(size, "x"), s.resident(size, "y")
    (f,) = s.op("f", (x, y), (size,))
    t = s.tangent(size, "t")
    (gy,) = s.op("by", (t, f), (size,), backward=True)
    (gx,) = s.op("bx", (gy, t), (size,), backward=True, overwrites=(gy,))
    (more,) = s.op("more", (gx, x), (size,), backward=True)
    return step(s.done((f,), {x: more, y: gy}))


HAND_MADE: dict[str, Callable[[], StepGraph]] = {
    "chain": chain,
    "elementwise": elementwise,
    "viewed": viewed,
    "diamond": diamond,
    "multi_output": multi_output,
    "batch_norm": batch_norm,
    "dropout": dropout,
    "read_twice": read_twice,
    "scaled": scaled,
    "shared_gradient": shared_gradient,
    "two_regions_and_loss": two_regions_and_loss,
    "passed_on": passed_on,
}


def weight_first() -> StepGraph:
    """A layer whose weight's gradient is made before its input's, which reads the weight; the former is applied."""
    s = Sketch()
    x, w = s.resident(MIB, "x"), s.resident(MIB, "w")
    (f,) = s.op("f", (x, w), (MIB,))
    (g,) = s.op("g", (f,), (MIB,))
    t = s.tangent(MIB, "t")
    (bg,) = s.op("bg", (t,), (MIB,), backward=True)
    (bw,) = s.op("bw", (bg, x), (MIB,), backward=True)
    (bx,) = s.op("bx", (bg, f, w), (MIB,), backward=True)
    region = s.done((g,), {w: bw, x: bx})
    flags = tuple(v == w for v in region.inputs)
    return step(replace(region, added=flags, applied=tuple(0 if flag else -1 for flag in flags)))
