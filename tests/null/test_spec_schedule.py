"""Every rule for schedules has schedules that break it, and the check names that rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from gradstow.ir import (
    Free,
    Region,
    RegionSchedule,
    Run,
    Schedule,
    SpecError,
    StepGraph,
    check_schedule,
    just_in_time,
)
from gradstow.ir._schedule_rules import SCHEDULE_RULES
from graphs import (
    HAND_MADE,
    MIB,
    Sketch,
    batch_norm,
    chain,
    diamond,
    dropout,
    elementwise,
    multi_output,
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
    """One region of a graph under a schedule, written as names; None takes just_in_time's part."""

    graph: StepGraph
    forward: str | None = None
    backward: str | None = None
    kept: Sequence[str] = ()
    region: int = 0

    def schedule(self) -> Schedule:
        plans = [just_in_time(r, range(len(r.storages)), reuse=r.managed) for r in self.graph.regions]
        region = self.graph.regions[self.region]
        kept = storages_of(region, *self.kept)
        plan = just_in_time(region, kept)
        if self.forward is not None:
            plan = replace(plan, forward=script(region, self.forward))
        if self.backward is not None:
            plan = replace(plan, backward=script(region, self.backward))
        plans[self.region] = replace(plan, kept=kept)
        return Schedule(tuple(plans))


def held(graph: StepGraph) -> StepGraph:
    return step(replace(graph.regions[0], held=True))


def output_read() -> StepGraph:
    """As elementwise(), but the output is the value that relu would write over."""
    graph = elementwise()
    return with_region(graph, 0, outputs=(*graph.regions[0].outputs, 2))


def scoped() -> StepGraph:
    """elementwise() as code that runs as plain PyTorch: one call for the forward, one for the backward."""
    ops = tuple(replace(op, scope=int(op.backward)) for op in elementwise().regions[0].ops)
    return with_region(elementwise(), 0, ops=ops, managed=False)


def added() -> StepGraph:
    """chain(2) where every weight has its gradient already."""
    return step(*chain(2).regions, grads_exist=True)


def seen_twice() -> StepGraph:
    """x → f → (view, relu, which may write over f) → g; the backward reads the view before and after relu."""
    s = Sketch()
    x, w = s.resident(MIB, "x"), s.resident(MIB, "w")
    (f,) = s.op("f", (x,), (MIB,))
    seen = s.view(f, "seen")
    (relu,) = s.op("relu", (f,), (MIB,), overwrites=(f,))
    (g,) = s.op("g", (relu, w), (MIB,))
    t = s.tangent(MIB, "t")
    (b1,) = s.op("b1", (t, seen), (MIB,), backward=True)
    (b2,) = s.op("b2", (b1, relu), (MIB,), backward=True)
    (b3,) = s.op("b3", (b2, seen), (MIB,), backward=True)
    return step(s.done((g,), {w: b3}))


BN_KEPT = ("bn.1", "bn.2")
BROKEN: dict[str, list[Case]] = {
    "forward-order": [
        Case(chain(), "f1 f2", kept=["f1", "f2"]),
        Case(chain(), "f1 f2 f2 f3", kept=["f1", "f2"]),
        Case(chain(), "f1 f2 f3 f3", kept=["f1", "f2"]),
        Case(diamond(), "f h g sum", kept=["f", "g", "h"]),
        Case(chain(), "f1 f2 f3 b3", kept=["f1", "f2"]),
        Case(viewed(), "f seen seen g", kept=["f"]),
    ],
    "backward-order": [
        Case(diamond(), backward="bg bh add bf", kept=["f", "g", "h"]),
        Case(chain(), backward="b3 b2", kept=["f1", "f2"]),
        Case(chain(), backward="b3 b2 b2 b1", kept=["f1", "f2"]),
        Case(viewed(), backward="seen bg flat flat bf add", kept=["f"]),
    ],
    "pinned": [Case(dropout(), backward="f bernoulli mul bg bmul bf add")],
    "unmanaged": [
        Case(two_regions_and_loss(), kept=["k"], region=2),
        Case(two_regions_and_loss(), backward="bmean bsoftmax<bmean", kept=["softmax"], region=2),
    ],
    "use-after-free": [
        Case(chain(), "f1 -f1 f2 f3", kept=["f2"]),
        Case(chain(), backward="b3 -f2 -f1 b2 b1", kept=["f1", "f2"]),
        Case(diamond(), "f g<f h sum", kept=["f", "g", "h"]),
    ],
    "made-before-use": [
        Case(chain(), backward="b3 b2 b1", kept=["f2"]),
        Case(viewed(), backward="bg bf flat add", kept=["f"]),
        Case(viewed(), "f g", kept=["f"]),
        Case(batch_norm(), backward="bg bbn bf add", kept=["f", "bn.0"]),
        Case(batch_norm(), backward="f bn bg bbn bf add", kept=["bn.1"]),
        Case(batch_norm(), backward="bg bbn bf add", kept=[*BN_KEPT, "f"]),
        Case(two_regions_and_loss(), backward="bk bh", kept=["h"], region=1),
        Case(viewed(), backward="f seen -f f bg bf flat add"),
        Case(held(with_op(chain(2), 0, "b2", inputs=(5, 3, 4, 2))), backward="f2 b2 b1", kept=["f1"]),
    ],
    "frees": [
        Case(chain(), "f1 f2 -f1 -f1 f3", kept=["f2"]),
        Case(chain(), "-f1 f1 f2 f3", kept=["f1", "f2"]),
        Case(chain(), "f1 f2 f3 -x", kept=["f1", "f2"]),
        Case(chain(), backward="b3 b2 b1 -w1", kept=["f1", "f2"]),
        Case(chain(), backward="b3 b2 b1 -f3", kept=["f1", "f2"]),
        Case(two_regions_and_loss(), "h -g k", kept=["g", "h"], region=1),
        Case(multi_output(), backward="f pool bg bpool -pool.1 -pool.1 bf"),
        Case(elementwise(), "f relu<f g -f", kept=["relu"]),
    ],
    "scope": [
        Case(scoped(), "f relu -f g", kept=["relu"]),
        Case(scoped(), backward="bg brelu -bg bf", kept=["relu"]),
    ],
    "reuse": [
        Case(diamond(), "f g h sum<g", kept=["f", "h"]),
        Case(elementwise(), "f relu<f g", kept=["f", "relu"]),
        Case(elementwise(), backward="bg brelu<relu bf", kept=["relu"]),
        Case(elementwise(), backward="bg<t brelu bf", kept=["relu"]),
        Case(output_read(), "f relu<f g", kept=["relu"]),
        Case(held(elementwise()), backward="bg brelu<g bf", kept=["relu"]),
        Case(elementwise(), backward="bg f relu<f brelu<bg bf", kept=["relu"]),
    ],
    "kept": [
        Case(chain(), kept=["f1", "f2", "w1"]),
        Case(chain(), kept=["f1", "f2", "f2"]),
        Case(chain(), "f1 f2 -f1 f3", kept=["f1", "f2"]),
        Case(chain(), kept=["f1", "f2", "b1"]),
    ],
    "outputs": [Case(chain(), "f1 f2 f3 -f3", kept=["f1", "f2"])],
    "deliveries": [
        Case(chain(2), backward="b2 ^w2 b1", kept=["f1"]),
        Case(added(), backward="^w2 b2 b1", kept=["f1"]),
        Case(added(), backward="b2 ^w2 ^w2 b1", kept=["f1"]),
        Case(added(), backward="b2 -b2.1 ^w2 b1", kept=["f1"]),
    ],
    "applied": [
        Case(weight_first(), backward="bg bw ^w -bw bx", kept=["f"]),
        Case(weight_first(), "f g", "bg bw ^w -bw f bx", kept=[]),
    ],
    "gradients": [
        Case(chain(), backward="b3 -b3.1 b2 b1", kept=["f1", "f2"]),
        Case(elementwise(), backward="bg brelu bf -bf", kept=["relu"]),
    ],
}
LEGAL = [
    Case(weight_first(), "f g", "f bg bw bx ^w -bw -bg", kept=[]),
    Case(added(), "f1 f2", "b2 ^w2 -b2.1 b1 ^w1 -b1", kept=["f1"]),
    Case(added(), "f1 f2", "b2 b1 ^w1,w2", kept=["f1"]),
    Case(chain(), "f1 f2 f3", "b3 b2 b1", kept=["f1", "f2"]),
    Case(chain(), "f1 f2 -f1 f3", "f1 b3 -f2 b2 b1", kept=["f2"]),
    Case(chain(), "f1 f2 -f1 f3 -f2", "f1 f2 -f1 b3 -f2 f1 b2 -f1 b1"),
    Case(elementwise(), "f relu<f g", "bg brelu<bg bf", kept=["relu"]),
    Case(viewed(), "f seen g", "seen bg bf flat add<bf", kept=["f"]),
    Case(viewed(), "f seen g", "seen bg flat bf add", kept=["f"]),
    Case(seen_twice(), "f relu<f g", "f seen b1 -f f relu b2 seen b3"),
    Case(seen_twice(), "f relu<f g", "f seen b1 relu<f b2 f seen b3"),
    Case(scoped(), "f relu g -f", "bg brelu bf -bg", kept=["relu"]),
    Case(batch_norm(), "f bn g", "bn bg bbn bf add", kept=["f", *BN_KEPT]),
    Case(multi_output(), "f pool -f g -pool.0", "bg bpool -pool.1 bf", kept=["pool.1"]),
    Case(two_regions_and_loss(), "h k", "bk -h bh -g", kept=["g", "h"], region=1),
]


def test_every_rule_is_broken_by_some_schedule() -> None:
    assert BROKEN.keys() == SCHEDULE_RULES.keys()


@pytest.mark.parametrize(("rule", "case"), [(rule, case) for rule, cases in BROKEN.items() for case in cases])
def test_a_broken_rule_is_named(rule: str, case: Case) -> None:
    with pytest.raises(SpecError) as caught:
        check_schedule(case.graph, case.schedule())
    assert caught.value.rule == rule
    assert caught.value.region == case.region
    assert SCHEDULE_RULES[rule].says in str(caught.value)


@pytest.mark.parametrize("case", LEGAL)
def test_legal_schedules_pass(case: Case) -> None:
    check_schedule(case.graph, case.schedule())


@pytest.mark.parametrize("name", HAND_MADE)
@pytest.mark.parametrize("share", [0, 1, 2])
@pytest.mark.parametrize("reuse", [True, False])
def test_what_just_in_time_writes_is_legal(name: str, share: int, reuse: bool) -> None:
    graph = HAND_MADE[name]()

    def kept(region: Region) -> range:
        return range(0, len(region.storages), share) if share and region.managed else range(len(region.storages))

    plans = [just_in_time(r, kept(r), reuse=reuse) for r in graph.regions]
    check_schedule(graph, Schedule(tuple(plans)))


def test_the_offender_is_named_with_its_place() -> None:
    case = Case(chain(), backward="b3 b2 b1", kept=["f2"])
    with pytest.raises(SpecError, match=r"region 0: op 4 \(b2: b2\), which reads value 4 \(f1\) in the backward"):
        check_schedule(case.graph, case.schedule())


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: replace(plan, kept=(99,)),
        lambda plan: replace(plan, forward=(*plan.forward, Run(99))),
        lambda plan: replace(plan, forward=(*plan.forward, Run(-1))),
        lambda plan: replace(plan, backward=(*plan.backward, Run(0, 99))),
        lambda plan: replace(plan, backward=(*plan.backward, Free(99))),
    ],
)
def test_ids_are_positions(change: Callable[[RegionSchedule], RegionSchedule]) -> None:
    graph = chain()
    with pytest.raises(SpecError) as caught:
        check_schedule(graph, Schedule((change(just_in_time(graph.regions[0], ())),)))
    assert caught.value.rule == "ids"


def test_one_schedule_per_region() -> None:
    graph = two_regions_and_loss()
    plans = tuple(just_in_time(r, range(len(r.storages))) for r in graph.regions)
    check_schedule(graph, Schedule(plans))
    with pytest.raises(SpecError, match="there are 3 regions") as caught:
        check_schedule(graph, Schedule(plans[:2]))
    assert caught.value.rule == "regions"
