"""The points of a frontier on a tower whose cheapest plan at each budget can be found by hand."""

from __future__ import annotations

from typing import Any

import pytest

from gradstow.ir import PlanData, Resident, check_schedule
from gradstow.planner import Effort, _frontier, frontier, make_plan, smallest_peak
from gradstow.planner._evaluate import Outcome
from gradstow.planner._search import Found
from graphs import HAND_MADE, MIB, Sketch, costs_of, step, two_regions_and_loss
from shapes import tower

SECONDS = {f"f{i + 1}": float(i + 1) for i in range(8)}


def kept(plan: PlanData) -> str:
    region = plan.graph.regions[0]
    return " ".join(v.name for v in region.values if v.storage in plan.schedule.regions[0].kept)


def test_every_mebibyte_less_of_a_tower() -> None:
    """f1 to f7, a tangent and a gradient are 9 MiB; fi takes i seconds, so the first are given up first."""
    graph = tower()
    plans, proven = frontier(graph, costs_of(graph, SECONDS), points=6)
    assert [plan.budget for plan in plans] == [f"{mib * MIB} B" for mib in (9, 8, 7, 6, 5, 4)]
    assert [plan.predicted_step_peak_bytes // MIB for plan in plans] == [9, 8, 7, 6, 5, 4]
    # at 6 MiB f1 f2 f3 run again; at 5 also f5, and f1 twice; at 4 only f6 and f7 are kept
    assert [plan.timeline.recompute_seconds for plan in plans] == [0, 1, 3, 6, 12, 35]
    assert [kept(plan) for plan in plans[:4]] == [
        "f1 f2 f3 f4 f5 f6 f7", "f2 f3 f4 f5 f6 f7", "f3 f4 f5 f6 f7", "f4 f5 f6 f7",
    ]  # fmt: skip
    assert proven == 4 * MIB
    for plan in plans:
        check_schedule(graph, plan.schedule)
        assert plan.policy == "auto"
        added = plan.lower_bound_seconds - plan.plain_seconds
        assert added <= plan.timeline.recompute_seconds <= added + 0.003 * plan.lower_bound_seconds


def test_points_between_are_as_good_as_what_is_below() -> None:
    graph = tower()
    plans, _ = frontier(graph, costs_of(graph, SECONDS), points=11)  # every half
    assert [plan.timeline.recompute_seconds for plan in plans] == [0, 1, 1, 3, 3, 6, 6, 12, 12, 35, 35]


@pytest.mark.parametrize("name", HAND_MADE)
def test_a_frontier_ends_where_the_planner_ends(name: str) -> None:
    graph = HAND_MADE[name]()
    costs = costs_of(graph)
    plans, proven = frontier(graph, costs, points=4)
    peaks = [plan.predicted_step_peak_bytes for plan in plans]
    assert peaks[0] == make_plan(graph, costs, step_budget=None, budget="").predicted_step_peak_bytes
    assert (peaks[-1], proven) == smallest_peak(graph, costs)
    assert proven <= peaks[-1]
    seconds = [plan.predicted_seconds for plan in plans]
    assert seconds == sorted(seconds)
    assert all(peak <= int(plan.budget.removesuffix(" B")) for peak, plan in zip(peaks, plans, strict=True))


def test_one_point_where_there_is_nothing_to_decide() -> None:
    s = Sketch()
    x, w = s.resident(), s.resident()
    (f,) = s.op("f", (x, w), (MIB,))
    (b,) = s.op("b", (s.tangent(), x), (MIB,), backward=True)
    graph = step(s.done((f,), {w: b}))
    plans, proven = frontier(graph, costs_of(graph), points=5)
    assert [plan.predicted_step_peak_bytes for plan in plans] == [2 * MIB] == [proven]


def test_resident_bytes_are_in_the_budgets_and_the_class_is_ones_own() -> None:
    class Mine(PlanData):
        pass

    graph = step(*tower(3).regions, resident=Resident(parameters=7))
    plans, _ = frontier(graph, costs_of(graph), points=2, kind=Mine)
    assert {type(plan) for plan in plans} == {Mine}
    assert [plan.budget for plan in plans] == [f"{plan.predicted_peak_bytes} B" for plan in plans]


def test_progress_counts_the_points() -> None:
    said: list[tuple[int, int]] = []
    frontier(tower(4), costs_of(tower(4)), points=4, progress=lambda done, total: said.append((done, total)))
    assert said == [(1, 4), (2, 4), (3, 4), (4, 4)]


def searched(monkeypatch: pytest.MonkeyPatch, *, mend: bool) -> list[PlanData]:
    """Points where the search finds nothing, and, but for ``mend``, mending the plan above does neither."""

    def nothing(*_: Any, **__: Any) -> Found:
        return Found(None)

    def unmended(_problem: object, outcome: Outcome, *_: object) -> Outcome:
        return outcome

    monkeypatch.setattr(_frontier, "search", nothing)
    if not mend:
        monkeypatch.setattr(_frontier, "settle", unmended)
    graph = tower()
    return frontier(graph, costs_of(graph, SECONDS), points=6)[0]


def test_where_no_search_finds_a_plan_the_one_above_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = searched(monkeypatch, mend=True)
    seconds = [plan.timeline.recompute_seconds for plan in plans]
    assert seconds[:3] == [0, 1, 3]
    assert all(a <= b for a, b in zip(seconds[3:], (7, 13, 35), strict=True)), "nearly as good as the search"


def test_where_nothing_else_fits_the_smallest_peak_does(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = searched(monkeypatch, mend=False)
    assert all(plan.predicted_step_peak_bytes <= mib * MIB for plan, mib in zip(plans, range(9, 3, -1), strict=True))
    assert plans[-1].predicted_step_peak_bytes == 4 * MIB
    seconds = [plan.timeline.recompute_seconds for plan in plans]
    assert seconds == sorted(seconds)
    assert max(seconds[1:-1]) < seconds[-1], "the room that is left is used"


def test_without_a_solver_nothing_is_proven_but_what_each_op_needs() -> None:
    graph = two_regions_and_loss()
    costs = costs_of(graph)
    plans, proven = frontier(graph, costs, points=3, effort=Effort(rounds=0))
    assert proven <= plans[-1].predicted_step_peak_bytes
    assert {plan.lower_bound_seconds for plan in plans} == {plans[0].plain_seconds}
