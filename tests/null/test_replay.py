"""Bytes at every moment of small schedules, counted by hand; and the second replayer on the same graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from gradstow.ir import CostTable, Run, Schedule, StepGraph, Timeline, just_in_time, replay
from graphs import (
    HAND_MADE,
    MIB,
    Sketch,
    batch_norm,
    chain,
    costs_of,
    elementwise,
    multi_output,
    passed_on,
    step,
    storages_of,
    two_regions_and_loss,
    viewed,
    with_region,
    with_storage,
)
from replayer import Ledger


def plan(graph: StepGraph, *kept: Sequence[str], reuse: bool = True) -> Schedule:
    """just_in_time of every region; where no names are given, everything is kept."""
    names = [*kept, *([None] * (len(graph.regions) - len(kept)))]
    return Schedule(
        tuple(
            just_in_time(r, range(len(r.storages)) if n is None else storages_of(r, *n), reuse=reuse)
            for r, n in zip(graph.regions, names, strict=True)
        )
    )


def during(timeline: Timeline) -> list[float]:
    return [m.during_bytes / MIB for m in timeline.moments]


def agree(timeline: Timeline, ledger: Ledger) -> bool:
    return (
        [m.during_bytes for m in timeline.moments] == ledger.during()
        and [m.after_bytes for m in timeline.moments] == ledger.after()
        and timeline.end_bytes == ledger.end()
    )


def test_a_chain_by_hand() -> None:
    graph = chain()
    costs = costs_of(graph, working={"b2": MIB // 2})
    stored = replay(graph, plan(graph), costs)
    # f1, f2, f3, which nobody holds; t, which lives to the end, and two of b3; f2 ends, two of b2; and so on
    assert during(stored) == [1, 2, 3, 5, 6.5, 5]
    assert (stored.peak_bytes, stored.peak_index) == (6.5 * MIB, 4)
    assert stored.end_bytes == 3 * MIB
    again = replay(graph, plan(graph, ()), costs)
    assert during(again) == [1, 2, 2, 2, 3, 5, 6.5, 5]
    assert [(m.op, m.backward, m.recompute) for m in again.moments[3:6]] == [
        (0, True, True),
        (1, True, True),
        (3, True, False),
    ]
    assert (again.seconds, again.recompute_seconds) == (8.0, 2.0)


def test_what_is_alive_at_the_peak() -> None:
    graph = elementwise()  # the peak of 3 MiB comes three times: the first counts
    timeline = replay(graph, plan(graph), costs_of(graph))
    assert timeline.peak_index == 3
    alive = storages_of(graph.regions[0], "relu", "t", "bg")
    assert {(life.region, life.storage) for life in timeline.alive(3)} == {(0, s) for s in alive}


def test_the_peak_counts_the_new_output() -> None:
    graph = chain(1)
    assert during(replay(graph, plan(graph), costs_of(graph))) == [1, 2]


def test_writing_over_an_input_adds_nothing() -> None:
    graph = elementwise()
    costs = costs_of(graph)
    assert during(replay(graph, plan(graph), costs)) == [1, 1, 2, 3, 3, 3]
    assert during(replay(graph, plan(graph, reuse=False), costs)) == [1, 2, 2, 3, 4, 3]


def test_views_add_nothing() -> None:
    graph = viewed()
    assert during(replay(graph, plan(graph), costs_of(graph))) == [1, 1, 2, 2, 4, 4, 3, 3]


def test_resident_storages_count_nothing() -> None:
    graph = chain()
    larger = with_storage(graph, 0, 1, nbytes=1000 * MIB)
    costs = costs_of(graph)
    assert during(replay(graph, plan(graph), costs)) == during(replay(larger, plan(larger), costs))


def test_an_output_beside_one_that_the_caller_holds_is_dropped_at_once() -> None:
    graph = with_region(multi_output(), 0, outputs=(3, 5), held=True)  # hands out pool.0 as well
    timeline = replay(graph, plan(graph, []), costs_of(graph))
    pool = next(m for m in timeline.moments if m.recompute and m.op == 1)
    # pool.0, g, bg, f (4 MiB), pool.1 (2 MiB) and t, which backward() holds; for the moment one more pool.0
    assert (pool.during_bytes, pool.after_bytes) == (11 * MIB, 10 * MIB)


def test_held_outputs_live_to_the_end() -> None:
    free, held = two_regions_and_loss(held=False), two_regions_and_loss(held=True)
    a, b = (replay(g, plan(g), costs_of(g)) for g in (free, held))
    # k (3 MiB) and the loss (4 bytes) are not read by any backward
    first = len([e for r in plan(held).regions for e in r.forward if isinstance(e, Run)])
    assert [m.during_bytes for m in a.moments[:first]] == [m.during_bytes for m in b.moments[:first]]
    assert {y.during_bytes - x.during_bytes for x, y in zip(a.moments[first:], b.moments[first:], strict=True)} == {
        3 * MIB + 4
    }
    assert b.end_bytes - a.end_bytes == 3 * MIB + 4


def test_outputs_that_nobody_reads_later() -> None:
    graph = chain(2)
    one, two = step(*graph.regions, outputs_held=False), step(*graph.regions, outputs_held=True)
    assert during(replay(one, plan(one), costs_of(one))) == [1, 2, 4, 4]
    assert during(replay(two, plan(two), costs_of(two))) == [1, 2, 5, 5]


def test_a_boundary_lives_as_long_as_a_region_keeps_it() -> None:
    graph = two_regions_and_loss(held=False)
    timeline = replay(graph, plan(graph), costs_of(graph))
    small = 4 / MIB
    assert during(timeline) == [
        1, 2,  # f, g
        3, 6,  # h, k beside f and g, which stay
        9, 9 + small,  # softmax, mean
        9 + small, 12 + small,  # mean and k are given up; the loss's gradient lives to the end
        7 + small, 5 + small,  # bk beside f, g, h and the tangent, which end there but for f and g; bh
        4 + small, 3 + small,  # bg beside the tangent, f and v's gradient; bf
    ]  # fmt: skip


def test_the_reserve_is_a_moment_between_the_parts() -> None:
    graph = step(*chain(2).regions, reserve_bytes=5 * MIB)
    timeline = replay(graph, plan(graph), costs_of(graph))
    assert during(timeline) == [1, 2, 7, 4, 3]
    assert (timeline.moments[2].op, timeline.moments[2].seconds) == (-1, 0.0)


def test_gradients_that_are_added_to_grad_are_given_up_once_delivered() -> None:
    fresh, added = (step(*chain(2).regions, grads_exist=flag) for flag in (False, True))
    assert replay(fresh, plan(fresh), costs_of(fresh)).end_bytes == 2 * MIB
    assert replay(added, plan(added), costs_of(added)).end_bytes == 0


def test_plain_counts_what_plain_pytorch_stores() -> None:
    graph = with_storage(chain(2), 0, storages_of(chain(2).regions[0], "f1")[0], plain_nbytes=4 * MIB)
    assert during(replay(graph, plan(graph), costs_of(graph))) == [1, 2, 4, 4]
    assert during(replay(graph, plan(graph), costs_of(graph), plain=True)) == [4, 5, 7, 4]


def test_a_rerun_costs_what_its_form_costs() -> None:
    graph = batch_norm()
    costs = costs_of(graph, {"bn": 5.0, "bn again": 0.25}, {"bn": 100, "bn again": 7})
    timeline = replay(graph, plan(graph, ["f"]), costs)
    (moment,) = [m for m in timeline.moments if m.recompute]
    assert moment.seconds == 0.25
    assert moment.during_bytes == moment.after_bytes + 7


def test_a_gradient_that_skips_a_region_is_alive_meanwhile() -> None:
    regions = []
    for r in range(3):
        s = Sketch(f"region {r}")
        inputs = [s.resident(8)]
        inputs += [s.boundary(100, (q, 1 if q == 0 else 2)) for q in range(r)] if r else []
        (f,) = s.op("f", inputs, (100,))
        t = s.tangent(100)
        made = s.op("b", (t,), (100,) * r, backward=True) if r else s.op("b", (t,), (8,), backward=True)
        given = inputs[1:] if r else inputs
        regions.append(s.done((f,), dict(zip(given, made, strict=True))))
    graph = step(regions[0], regions[1], replace(regions[2]))
    timeline = replay(graph, plan(graph), costs_of(graph))
    assert agree(timeline, Ledger(graph, plan(graph), costs_of(graph)))
    # region 1 runs its backward: both tangents, its own gradient, and region 2's for region 0
    assert timeline.moments[4].during_bytes == 400


def test_a_gradient_for_what_no_graph_made_lives_until_the_region_before_runs_its_backward() -> None:
    graph = passed_on()
    timeline = replay(graph, plan(graph), costs_of(graph))
    small = 8 / MIB  # the loss, which the caller holds, and its gradient
    # bk and bh as in the test above; then v's gradient is gone, and g, which was handed out, stays to the end:
    # bg beside f, g and the tangent; bf beside g and bg
    assert during(timeline)[-4:] == [7 + small, 5 + small, 4 + small, 3 + small]
    assert timeline.end_bytes == 2 * MIB + 4


@pytest.mark.parametrize("name", HAND_MADE)
@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("plain", [True, False])
def test_the_second_replayer_agrees(name: str, reuse: bool, plain: bool) -> None:
    graph = HAND_MADE[name]()
    for kept in (None, ()):
        schedule = plan(graph, *([] if kept is None else [kept]), reuse=reuse)
        costs = costs_of(graph, working={"g": 77})
        assert agree(replay(graph, schedule, costs, plain=plain), Ledger(graph, schedule, costs, plain))


def test_the_comparison_sees_a_difference() -> None:
    graph = chain()
    costs = costs_of(graph)
    schedule, other = plan(graph), plan(graph, ())
    assert agree(replay(graph, schedule, costs), Ledger(graph, schedule, costs))
    assert not agree(replay(graph, schedule, costs), Ledger(graph, other, costs))
    heavier: CostTable = costs_of(graph, working={"f2": 1})
    assert not agree(replay(graph, schedule, costs), Ledger(graph, schedule, heavier))
    ledger = Ledger(graph, schedule, costs)
    ledger.blocks[-1].nbytes += 1
    assert not agree(replay(graph, schedule, costs), ledger)
    ledger = Ledger(graph, schedule, costs)
    ledger.blocks[0].end += 1
    assert not agree(replay(graph, schedule, costs), ledger)
