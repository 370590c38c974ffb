"""The exact events that ``just_in_time`` writes on small graphs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from gradstow.ir import (
    Deliver,
    Event,
    Free,
    RegionSchedule,
    Run,
    StepGraph,
    delivered_storages,
    deliveries,
    just_in_time,
    write_events,
)
from graphs import (
    HAND_MADE,
    MIB,
    Sketch,
    batch_norm,
    chain,
    coded,
    diamond,
    dropout,
    elementwise,
    multi_output,
    scaled,
    script,
    step,
    storages_of,
    two_regions_and_loss,
    viewed,
    weight_first,
    with_op,
    with_region,
)


@dataclass(frozen=True)
class Case:
    """Events that are expected, by name; ``kept`` is what comes out where ``asked`` went in."""

    graph: StepGraph
    asked: tuple[str, ...]
    kept: tuple[str, ...]
    forward: str
    backward: str
    region: int = 0

    def expected(self) -> RegionSchedule:
        region = self.graph.regions[self.region]
        kept = tuple(sorted(storages_of(region, *self.kept)))
        return RegionSchedule(kept, script(region, self.forward), script(region, self.backward))


def small_beside_large() -> StepGraph:
    """x → f(w, v) → g(u): the gradient of v is a crumb beside that of w, and u's is made first."""
    s = Sketch()
    x, w, v, u = s.resident(MIB, "x"), s.resident(MIB, "w"), s.resident(100, "v"), s.resident(100, "u")
    (f,) = s.op("f", (x, w, v), (MIB,))
    (g,) = s.op("g", (f, u), (MIB,))
    t = s.tangent(MIB, "t")
    bg, gu = s.op("bg", (t, f, u), (MIB, 100), backward=True)
    (gv,) = s.op("bv", (bg,), (100,), backward=True)
    (gw,) = s.op("bw", (bg, x), (MIB,), backward=True)
    return step(s.done((g,), {w: gw, v: gv, u: gu}), grads_exist=True)


LOSS = two_regions_and_loss()
ADDED = step(*chain().regions, grads_exist=True)
CASES = {
    "chain, nothing kept": Case(
        chain(), (), (), "f1 f2 -f1 f3 -f2", "f1 f2 b3 -f2 -t b2 -f1 -b3.0 b1 -b2.0"
    ),
    "chain, the first kept": Case(
        chain(), ("f1",), ("f1",), "f1 f2 f3 -f2", "f2 b3 -f2 -t b2 -f1 -b3.0 b1 -b2.0"
    ),
    "chain, the second kept": Case(
        chain(), ("f2",), ("f2",), "f1 f2 -f1 f3", "b3 -t -f2 f1 b2 -b3.0 -f1 b1 -b2.0"
    ),
    "chain, all kept": Case(
        chain(), ("f1", "f2"), ("f1", "f2"), "f1 f2 f3", "b3 -t -f2 b2 -b3.0 -f1 b1 -b2.0"
    ),
    "the output is not kept where the backward does not read it": Case(
        chain(2), ("f1", "f2"), ("f1",), "f1 f2", "b2 -t -f1 b1 -b2.0"
    ),
    "weights and gradients are never kept": Case(
        chain(2), ("x", "w1", "w2", "t", "b1", "f1"), ("f1",), "f1 f2", "b2 -t -f1 b1 -b2.0"
    ),
    "relu writes over its input, its gradient over the one that arrives": Case(
        elementwise(), ("relu",), ("relu",), "f relu<f g", "bg -t brelu<bg -relu bf -brelu"
    ),
    "nothing writes over what is kept": Case(
        with_op(elementwise(), 0, "brelu", inputs=(6, 3, 2)),
        ("f", "relu"),
        ("f", "relu"),
        "f relu g",
        "bg -t brelu<bg -relu -f bf -brelu",
    ),
    "a recomputation writes over a recomputed input": Case(
        elementwise(), (), (), "f relu<f g -relu", "bg -t f relu<f brelu<bg -relu bf -brelu"
    ),
    "a view runs again from what its storage was made as": Case(
        viewed(), ("f",), ("f",), "f seen g", "seen bg -t -f bf -bg.0 flat add<bf -bg.1"
    ),
    "a view of what is made again": Case(
        viewed(), (), (), "f seen g -f", "f seen bg -t -f bf -bg.0 flat add<bf -bg.1"
    ),
    "both branches of a diamond share one rerun": Case(
        diamond(), (), (), "f g h -f sum -g -h", "f h bh -h g bg -t -g -f add<bg -bh bf -add"
    ),
    "a rerun for one output drops the other at once": Case(
        multi_output(), (), (), "f pool -f -pool.1 g -pool.0", "bg -t f pool -f -pool.0 bpool -bg -pool.1 bf -bpool"
    ),
    "BatchNorm is made again by its form, from the kept statistics": Case(
        batch_norm(),
        ("f",),
        ("f", "bn.1", "bn.2"),
        "f bn g -bn.0",
        "bn bg -t -bn.0 bbn -bg.0 -f -bn.1 -bn.2 bf -bbn add -bg.1 -bf",
    ),
    "nothing is encoded where nothing of it is kept": Case(
        coded(), (), (), "f g -f", "f encode -f decode -encode bg -t -decode bf -bg"
    ),
    "what is encoded runs in the forward where it is kept": Case(
        coded(), ("encode",), ("encode",), "f encode g -f", "decode -encode bg -t -decode bf -bg"
    ),
    "a constant runs again where it is read, and is neither kept nor given back": Case(
        scaled(), (), (), "table f g -f", "table f bg -t -f flat bf -bg"
    ),
    "a pinned op is kept though nobody asked": Case(
        dropout(),
        ("mul",),
        ("bernoulli", "mul"),
        "f bernoulli mul<f g",
        "bg -t -mul bmul<bg.0 -bernoulli bf -bmul add<bg.1 -bf",
    ),
    "around a pinned op the rest is made again": Case(
        dropout(),
        (),
        ("bernoulli",),
        "f bernoulli mul<f g -mul",
        "f mul<f bg -t -mul bmul<bg.0 -bernoulli bf -bmul add<bg.1 -bf",
    ),
    "gradients that are added to others leave as they are made": Case(
        ADDED, ("f1", "f2"), ("f1", "f2"), "f1 f2 f3", "b3 ^w3 -b3.1 -t -f2 b2 ^w2 -b2.1 -b3.0 -f1 b1 ^w1 -b1 -b2.0"
    ),
    "small gradients wait for a large one": Case(
        small_beside_large(), ("f",), ("f",), "f g", "bg -t -f bv bw ^u,v,w -bg.1 -bv -bw -bg.0"
    ),
    "a region's output stays for the next one": Case(LOSS, (), (), "f g -f", "f bg -t -f bf -bg"),
    "a boundary that the backward reads is kept though nobody asked": Case(
        LOSS, ("h",), ("g", "h"), "h k", "bk -t -h bh -bk -g", region=1
    ),
    "the loss keeps everything": Case(
        LOSS, ("softmax",), ("softmax",), "softmax mean", "bmean -t bsoftmax -softmax -bmean", region=2
    ),
}  # fmt: skip


def same(got: RegionSchedule, expected: RegionSchedule) -> bool:
    """Equal but for the order of what is given back after one and the same op."""
    return got.kept == expected.kept and all(
        _grouped(a) == _grouped(b) for a, b in ((got.forward, expected.forward), (got.backward, expected.backward))
    )


def _grouped(events: tuple[Event, ...]) -> list[tuple[Event | None, set[int]]]:
    groups: list[tuple[Event | None, set[int]]] = [(None, set())]
    for event in events:
        if not isinstance(event, Free):
            groups.append((event, set()))
        else:
            assert event.storage not in groups[-1][1]
            groups[-1][1].add(event.storage)
    return groups


@pytest.mark.parametrize("name", CASES)
def test_events(name: str) -> None:
    case = CASES[name]
    region = case.graph.regions[case.region]
    got = just_in_time(region, storages_of(region, *case.asked))
    assert same(got, case.expected()), got


def test_the_comparison_sees_a_difference() -> None:
    expected = CASES["chain, the first kept"].expected()
    assert same(expected, expected)
    for other in (
        replace(expected, kept=()),
        replace(expected, forward=expected.forward[:-1]),
        replace(expected, backward=expected.backward[::-1]),
        replace(expected, backward=(Run(0, 4), *expected.backward[1:])),
        replace(expected, backward=(*expected.backward, Free(0))),
    ):
        assert not same(expected, other)


def test_a_tuple_to_the_last_event() -> None:
    region = chain().regions[0]
    f1, f2, t, b3, b2 = storages_of(region, "f1", "f2", "t", "b3.0", "b2.0")
    assert just_in_time(region, {f1}) == RegionSchedule(
        kept=(f1,),
        forward=(Run(0), Run(1), Run(2), Free(f2)),
        backward=(Run(1), Run(3), Free(t), Free(f2), Run(4), Free(b3), Free(f1), Run(5), Free(b2)),
    )


def test_plain_pytorch_hands_every_gradient_over_at_once() -> None:
    region = small_beside_large().regions[0]
    plan = write_events(region, {}, plain=True)
    assert [e.gradients for e in plan.backward if isinstance(e, Deliver)] == [(3,), (2,), (1,)]


def test_small_gradients_that_come_last_leave_with_the_last_op() -> None:
    region = small_beside_large().regions[0]
    ops = list(region.ops)
    ops[-2:] = ops[:-3:-1]  # bw before bv
    plan = write_events(replace(region, ops=tuple(ops)), {})
    assert plan.backward == script(replace(region, ops=tuple(ops)), "bg -t -f bw ^u,w -bg.1 -bw bv ^v -bg.0 -bv")


def test_gradients_that_are_views_of_one_storage_leave_together() -> None:
    """As the two halves of what one op makes for a packed pair of weights."""
    s = Sketch()
    x, w, v = s.resident(MIB, "x"), s.resident(MIB, "w"), s.resident(MIB, "v")
    (f,) = s.op("f", (x, w, v), (MIB,))
    t = s.tangent(MIB, "t")
    (both,) = s.op("both", (t, x), (2 * MIB,), backward=True)
    (more,) = s.op("more", (both, t), (MIB,), backward=True)
    half = s.view(s.view(both, "flat", backward=True), "half", backward=True)
    region = step(s.done((f,), {w: both, v: half, x: more}), grads_exist=True).regions[0]
    assert deliveries(region) == {1: (1, 2), 2: (0,)}
    assert delivered_storages(region, deliveries(region)) == {
        1: storages_of(region, "both"),
        2: storages_of(region, "more"),
    }
    plan = write_events(region, {})
    backward = script(region, "both flat half ^w,v more ^x -t -both -more")
    assert same(plan, replace(plan, backward=backward))


def test_an_applied_gradient_waits_for_the_last_reader_of_its_weight() -> None:
    """Its own op comes first, then one that reads the weight, and one for which an op that reads it may run again."""
    region = weight_first().regions[0]
    w = region.inputs.index(next(i for i, v in enumerate(region.values) if v.name == "w"))
    names = [op.name for op in region.ops]
    assert deliveries(replace(region, applied=())) == {names.index("bw"): (w,)}
    assert deliveries(region) == {names.index("bx"): (w,)}
    pinned = [replace(op, pinned="random") if op.name == "f" else op for op in region.ops]
    shown = [replace(op, inputs=op.inputs[:1]) if op.name == "bx" else op for op in pinned]  # reads w no more
    assert deliveries(replace(region, ops=tuple(shown))) == {names.index("bw"): (w,)}


def test_a_view_that_is_read_itself_and_through_another_runs_once() -> None:
    s = Sketch()
    x, w = s.resident(MIB, "x"), s.resident(MIB, "w")
    (f,) = s.op("f", (x, w), (MIB,))
    (g,) = s.op("g", (f,), (MIB,))
    t = s.tangent(MIB, "t")
    flat = s.view(f, "flat", backward=True)
    half = s.view(flat, "half", backward=True)
    (b,) = s.op("b", (t, flat, half), (MIB,), backward=True)
    region = step(s.done((g,), {w: b})).regions[0]
    assert write_events(region, {}).backward == script(region, "flat half b -t -f")


def test_gradients_stay_where_the_inputs_cannot_pass_through() -> None:
    region = replace(ADDED.regions[0], streams=False)
    assert not [e for e in write_events(region, {}).backward if isinstance(e, Deliver)]
    mixed = replace(ADDED.regions[0], added=(False, True, False, True))
    assert [e.gradients for e in write_events(mixed, {}).backward if isinstance(e, Deliver)] == [(3,), (1,)]


def test_without_reuse_nothing_is_written_over() -> None:
    for make in HAND_MADE.values():
        for region in make().regions:
            plan = just_in_time(region, (), reuse=False)
            assert all(e.reuse == -1 for e in (*plan.forward, *plan.backward) if isinstance(e, Run))


def test_an_unmanaged_region_writes_over_nothing() -> None:
    region = with_region(elementwise(), 0, managed=False).regions[0]
    plan = just_in_time(region, range(len(region.storages)))
    assert all(e.reuse == -1 for e in (*plan.forward, *plan.backward) if isinstance(e, Run))


def test_outputs_that_the_caller_holds_are_kept_without_being_asked_for() -> None:
    graph = with_op(chain(2), 0, "b2", inputs=(5, 3, 4, 2))  # reads f2 as well
    f1, f2 = storages_of(graph.regions[0], "f1", "f2")
    assert just_in_time(graph.regions[0], {f1}).kept == (f1,)
    held = step(replace(graph.regions[0], held=True))
    assert just_in_time(held.regions[0], {f1}).kept == (f1, f2)


def test_an_input_that_is_handed_out_is_not_kept() -> None:
    graph = chain(2)
    x = graph.regions[0].inputs[0]
    region = replace(graph.regions[0], outputs=(*graph.regions[0].outputs, x), held=True)
    assert storages_of(region, "x")[0] not in just_in_time(region, range(len(region.storages))).kept


def test_views_that_nobody_reads_do_not_run() -> None:
    graph = viewed()
    region = replace(graph.regions[0], ops=tuple(
        replace(op, inputs=tuple(2 if v == 3 else v for v in op.inputs)) for op in graph.regions[0].ops
    ))  # fmt: skip
    plan = just_in_time(region, storages_of(region, "f"))
    assert plan.forward == script(region, "f g")
    assert script(region, "seen")[0] not in plan.backward


def test_a_storage_that_is_made_again_has_two_lives() -> None:
    """f2 is kept for b3, given back, and made once more for b1, which reads it as well here."""
    region = with_op(chain(4), 0, "b1", inputs=(14, 0, 1, 6)).regions[0]
    once, twice = write_events(region, {}), write_events(region, {7: (0, 1)})
    assert once.kept == twice.kept == storages_of(region, "f1", "f2", "f3")
    assert once.backward == script(region, "b4 -t -f3 b3 -b4.0 b2 -b3.0 -f1 b1 -b2.0 -f2")
    assert twice.backward == script(region, "b4 -t -f3 b3 -b4.0 -f2 b2 -b3.0 -f1 f1 f2 -f1 b1 -b2.0 -f2")


def test_a_view_is_made_anew_in_each_life() -> None:
    region = with_op(viewed(), 0, "bf", inputs=(6, 0, 3)).regions[0]  # reads the view as well
    plan = write_events(region, {5: (0,)})
    assert plan.kept == storages_of(region, "f")
    assert plan.backward == script(region, "seen bg -t -f f seen bf -bg.0 -f flat add<bf -bg.1")


def test_what_nobody_reads_is_given_back_at_once() -> None:
    region = chain().regions[0]
    plan = write_events(region, {4: (1,)})
    assert plan.backward == script(region, "b3 -t -f2 f2 -f2 b2 -b3.0 -f1 b1 -b2.0")
