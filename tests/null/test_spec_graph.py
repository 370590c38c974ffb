"""Every rule for graphs has graphs that break it, and the check names that rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from gradstow.ir import Op, Region, Resident, SpecError, StepGraph, StorageKind, Value, check_graph
from gradstow.ir._graph_rules import GRAPH_RULES
from graphs import (
    HAND_MADE,
    MIB,
    Sketch,
    batch_norm,
    chain,
    dropout,
    elementwise,
    kept_as_code,
    scaled,
    storages_of,
    two_regions_and_loss,
    viewed,
    with_op,
    with_region,
    with_storage,
)


def region_of(graph: StepGraph, r: int = 0) -> Region:
    return graph.regions[r]


def value(graph: StepGraph, name: str, r: int = 0) -> int:
    return next(i for i, v in enumerate(graph.regions[r].values) if v.name == name)


def reordered(graph: StepGraph, first: str, second: str) -> StepGraph:
    """Two ops in each other's place."""
    ops = list(graph.regions[0].ops)
    names = [op.name for op in ops]
    i, j = names.index(first), names.index(second)
    ops[i], ops[j] = ops[j], ops[i]
    return with_region(graph, 0, ops=tuple(ops))


def made_by_two() -> StepGraph:
    s = Sketch()
    x, w = s.resident(), s.resident()
    (f,) = s.op("f", (x, w), (MIB,))
    again = s.value(s.values[f].storage)
    s.ops.append(Op("g", "g", (x,), (again,)))
    return StepGraph((s.done((again,), {}),), Resident())


def two_on_one_storage() -> StepGraph:
    s = Sketch()
    x = s.resident()
    (f,) = s.op("f", (x,), (MIB,))
    second = s.value(s.values[f].storage)
    s.ops[-1] = replace(s.ops[-1], outputs=(f, second))
    return StepGraph((s.done((f,), {}),), Resident())


def over_its_input(*, writes: bool) -> StepGraph:
    s = Sketch()
    x = s.resident()
    result = s.value(0)
    s.ops.append(Op("f", "f", (x,), (result,), writes=(0,) if writes else (), pinned="changes its input"))
    return StepGraph((s.done((result,), {}),), Resident())


def twice_from(origin: tuple[int, int]) -> StepGraph:
    """A second boundary storage with an origin that is taken already."""
    graph = two_regions_and_loss()
    region = region_of(graph, 1)
    storage = replace(region.storages[0], origin=origin)
    extra = replace(region.values[0], storage=len(region.storages))
    return with_region(
        graph,
        1,
        storages=(*region.storages, storage),
        values=(*region.values, extra),
        inputs=(*region.inputs, len(region.values)),
        gradients=(*region.gradients, -1),
        accumulated=(*region.accumulated, False),
        added=(*region.added, False),
    )


def astray(graph: StepGraph, storage: int) -> tuple[Value, ...]:
    """The values, of which the last lies on another storage."""
    *others, last = region_of(graph).values
    return (*others, replace(last, storage=storage))


def unnamed_storage() -> StepGraph:
    graph = chain()
    return with_region(graph, 0, storages=(*region_of(graph).storages, region_of(graph).storages[0]))


def unmade_value() -> StepGraph:
    graph = chain()
    return with_region(graph, 0, values=(*region_of(graph).values, region_of(graph).values[0]))


def rerun_with(graph: StepGraph, *, inputs: Sequence[str], outputs: Sequence[str], op: str = "bn") -> StepGraph:
    rerun = next(o.rerun for o in region_of(batch_norm()).ops if o.rerun is not None)
    made = replace(
        rerun,
        inputs=tuple(value(graph, name) for name in inputs),
        outputs=tuple(value(graph, name) for name in outputs),
    )
    return with_op(graph, 0, op, rerun=made)


def unlike_twins() -> StepGraph:
    graph = two_regions_and_loss()
    return replace(graph, regions=tuple(replace(r, fingerprint="same") for r in graph.regions))


def twins(**changed: object) -> StepGraph:
    """chain() and itself again, with one of its ops changed."""
    regions = (region_of(chain()), region_of(with_op(chain(), 0, "f2", **changed)))
    return StepGraph(tuple(replace(r, fingerprint="same") for r in regions), Resident())


RESIDENT, ACTIVATION, BOUNDARY = StorageKind.RESIDENT, StorageKind.ACTIVATION, StorageKind.BOUNDARY
BROKEN: dict[str, list[Callable[[], StepGraph]]] = {
    "ids": [
        lambda: with_region(chain(), 0, values=astray(chain(), 99)),
        lambda: with_region(chain(), 0, values=astray(chain(), -1)),
        lambda: with_op(chain(), 0, "f2", inputs=(99,)),
        lambda: with_op(chain(), 0, "f2", outputs=(-1,)),
        lambda: with_op(batch_norm(), 0, "bn", writes=(99,)),
        lambda: with_region(chain(), 0, tangents=(99,)),
        lambda: with_region(chain(), 0, outputs=(-2,)),
    ],
    "lengths": [
        lambda: with_region(chain(), 0, accumulated=(True,)),
        lambda: with_region(chain(), 0, added=()),
        lambda: with_region(chain(), 0, gradients=()),
        lambda: with_region(chain(), 0, tangent_mask=(True, True)),
    ],
    "sizes": [
        lambda: with_storage(chain(), 0, 4, nbytes=-1),
        lambda: with_storage(chain(), 0, 4, plain_nbytes=-2),
        lambda: replace(chain(), reserve_bytes=-1),
        lambda: replace(chain(), optimizer_peak_bytes=-1),
        lambda: replace(chain(), outside_bytes=-1),
        lambda: replace(chain(), resident=Resident(batch=-1)),
    ],
    "forward-first": [lambda: reordered(chain(), "f3", "b3")],
    "made-once": [
        lambda: with_region(chain(), 0, tangents=(0,)),
        lambda: with_op(chain(), 0, "f2", outputs=(value(chain(), "f1"),)),
        unmade_value,
    ],
    "made-before-use": [
        lambda: reordered(chain(), "f1", "f2"),
        lambda: reordered(chain(), "b2", "b3"),
        lambda: with_op(chain(), 0, "f2", inputs=(value(chain(), "t"),)),
    ],
    "named": [unnamed_storage],
    "kinds": [
        lambda: with_storage(chain(), 0, storages_of(region_of(chain()), "f1")[0], kind=StorageKind.GRADIENT),
        lambda: with_storage(chain(), 0, storages_of(region_of(chain()), "b1")[0], kind=ACTIVATION),
        lambda: with_storage(chain(), 0, storages_of(region_of(chain()), "f1")[0], kind=RESIDENT),
        lambda: with_storage(chain(), 0, storages_of(region_of(chain()), "t")[0], kind=RESIDENT),
        lambda: with_storage(chain(), 0, storages_of(region_of(chain()), "x")[0], kind=ACTIVATION),
    ],
    "one-maker": [made_by_two],
    "origins": [
        lambda: with_storage(two_regions_and_loss(), 1, 0, origin=None),
        lambda: with_storage(two_regions_and_loss(), 1, 1, origin=(0, 3)),
        lambda: with_storage(two_regions_and_loss(), 1, 0, origin=(1, 2)),
        lambda: with_storage(two_regions_and_loss(), 1, 0, origin=(0, 99)),
        lambda: with_storage(two_regions_and_loss(), 1, 0, origin=storage_origin("f")),
        lambda: with_storage(two_regions_and_loss(), 1, 0, origin=storage_origin("x")),
        lambda: with_storage(two_regions_and_loss(), 1, 0, nbytes=7),
        lambda: twice_from(storage_origin("g")),
    ],
    "views": [
        lambda: with_op(viewed(), 0, "seen", pinned="draws random numbers"),
        lambda: with_op(viewed(), 0, "g", view=True),
        lambda: with_storage(scaled(), 0, storages_of(region_of(scaled()), "table")[0], kind=ACTIVATION),
        lambda: with_op(viewed(), 0, "seen", overwrites=(value(viewed(), "f"),)),
    ],
    "lazy": [
        lambda: with_op(chain(), 0, "f1", lazy=True),
        lambda: with_op(chain(), 0, "f3", lazy=True),
        lambda: with_op(chain(), 0, "b3", lazy=True),
        lambda: with_op(viewed(), 0, "seen", lazy=True),
        lambda: with_region(with_op(chain(), 0, "f3", lazy=True), 0, outputs=(), managed=False),
    ],
    "bases": [two_on_one_storage, lambda: over_its_input(writes=False)],
    "writes": [
        lambda: with_op(batch_norm(), 0, "bn", rerun=None),
        lambda: with_op(batch_norm(), 0, "bn", writes=storages_of(region_of(batch_norm()), "w")),
        lambda: with_op(batch_norm(), 0, "bn", writes=storages_of(region_of(batch_norm()), "f")),
    ],
    "overwrites": [
        lambda: with_op(elementwise(), 0, "relu", overwrites=(value(elementwise(), "x"),)),
        lambda: with_storage(elementwise(), 0, storages_of(region_of(elementwise()), "f")[0], nbytes=7),
        lambda: with_op(batch_norm(), 0, "bn", overwrites=(value(batch_norm(), "f"),)),
    ],
    "reruns": [
        lambda: rerun_with(batch_norm(), inputs=["f"], outputs=["g"]),
        lambda: rerun_with(batch_norm(), inputs=["f"], outputs=[]),
        lambda: rerun_with(batch_norm(), inputs=["f", "bn.0"], outputs=["bn.0", "bn.1"]),
        lambda: rerun_with(batch_norm(), inputs=["g"], outputs=["bn.0"]),
        lambda: rerun_with(batch_norm(), inputs=["t"], outputs=["bbn"], op="bbn"),
        lambda: with_op(batch_norm(), 0, "bn", pinned="draws random numbers"),
        lambda: with_code(pinned=""),
        lambda: with_op(kept_as_code(), 0, "g", pinned="draws random numbers"),
    ],
    "results": [
        lambda: with_region(chain(), 0, outputs=(value(chain(), "t"),)),
        lambda: with_region(chain(), 0, outputs=(value(chain(), "b2.0"),)),
        lambda: with_region(chain(), 0, gradients=(value(chain(), "f1"), -1, -1, -1)),
        lambda: with_region(two_regions_and_loss(), 1, accumulated=(True, True)),
        lambda: with_region(chain(), 0, added=(True,) * 4),
    ],
    "twins": [
        unlike_twins,
        lambda: twins(target="another"),
        lambda: twins(inputs=(value(chain(), "f1"),)),
    ],
}


def with_code(**fields: Any) -> StepGraph:
    """A graph whose code is changed."""
    return with_op(kept_as_code(), 0, "encode", **fields)


def storage_origin(name: str) -> tuple[int, int]:
    return 0, storages_of(region_of(two_regions_and_loss()), name)[0]


def test_every_rule_is_broken_by_some_graph() -> None:
    assert BROKEN.keys() == GRAPH_RULES.keys()


@pytest.mark.parametrize(("rule", "make"), [(rule, make) for rule, cases in BROKEN.items() for make in cases])
def test_a_broken_rule_is_named(rule: str, make: Callable[[], StepGraph]) -> None:
    with pytest.raises(SpecError) as caught:
        check_graph(make())
    assert caught.value.rule == rule
    assert GRAPH_RULES[rule].says in str(caught.value)


def test_the_first_offender_is_named_with_its_place() -> None:
    graph = with_op(two_regions_and_loss(), 1, "k", inputs=(value(two_regions_and_loss(), "bh.1", 1),))
    with pytest.raises(SpecError, match=r"region 1: op 1 \(k: k\), which reads value 7 \(bh.1\)") as caught:
        check_graph(graph)
    assert (caught.value.rule, caught.value.region) == ("made-before-use", 1)


def test_a_rule_goes_on_after_its_first_offender() -> None:
    graph = with_storage(two_regions_and_loss(), 1, 0, origin=(0, 99))
    f = storages_of(region_of(graph, 1), "h")[0]
    graph = with_storage(graph, 1, f, origin=storage_origin("g"))
    assert list(GRAPH_RULES["origins"].broken(graph, 1)) == [
        "storage 0 with origin (0, 99)",
        f"storage {f} (activation, origin {storage_origin('g')})",
    ]


@pytest.mark.parametrize("name", HAND_MADE)
def test_hand_made_graphs_are_legal(name: str) -> None:
    check_graph(HAND_MADE[name]())


def test_what_is_legal_but_unusual() -> None:
    check_graph(over_its_input(writes=True))
    check_graph(twins())
    check_graph(with_op(dropout(), 0, "bernoulli", pinned=""))
    check_graph(with_region(chain(), 0, tangent_mask=()))
    check_graph(with_region(chain(), 0, outputs=(*region_of(chain()).outputs, -1, value(chain(), "x"))))
