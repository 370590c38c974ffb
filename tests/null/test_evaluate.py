"""Bytes at every moment of small orders, counted by hand, as the planner's inner loop sees them."""

from __future__ import annotations

import pytest

from gradstow.errors import BudgetTooSmall
from gradstow.ir import Schedule, StepGraph, check_schedule, just_in_time, replay
from gradstow.planner import make_plan, smallest_peak
from gradstow.planner._evaluate import evaluate, expand
from gradstow.planner._problem import build_problem
from graphs import (
    MIB,
    Sketch,
    chain,
    coded,
    costs_of,
    elementwise,
    multi_output,
    step,
    storages_of,
    weight_first,
    with_region,
)


def during(graph: StepGraph, *, keep: bool) -> list[float]:
    problem = build_problem(graph, costs_of(graph))
    found = evaluate(problem, expand(problem, set(problem.keepable) if keep else set()))
    assert found.peak_bytes == max(found.during)
    return [nbytes / MIB for nbytes in found.during]


@pytest.mark.parametrize(
    ("exist", "backward"),
    [
        (False, [6, 7, 7, 6]),  # each gradient stays beside the next
        (True, [6, 6, 5, 3]),  # each is added to its .grad and given back
    ],
)
def test_gradients_of_a_chain(exist: bool, backward: list[float]) -> None:
    assert during(step(*chain(4).regions, grads_exist=exist), keep=True) == [1, 2, 3, 4, *backward]


def test_what_is_made_beside_a_copy_that_the_caller_holds_is_dropped_at_once() -> None:
    graph = with_region(multi_output(), 0, outputs=(3, 5), held=True)  # hands out pool.0 as well
    # backward: pool.0, g and t all along; bg; f; pool once more, both of its outputs; without that copy bpool; bf
    assert during(graph, keep=False) == [4, 7, 2, 4, 8, 11, 10, 8]


@pytest.mark.parametrize(
    ("kept", "moments", "seconds"),
    [
        # f, encode, decode, g; where nothing of it is kept encode and decode do not run there, and all three run again
        ("t", [1, 0, 0, 2, 2, 2.125, 2.125, 3, 3], 3),
        ("encode", [1, 1.125, 0, 2.125, 2.125, 3, 3], 2),
        ("decode", [1, 1.125, 2.125, 3, 3, 3], 2),
        ("f", [1, 0, 0, 2, 2.125, 2.125, 3, 3], 2),
    ],
)
def test_what_is_encoded(kept: str, moments: list[float], seconds: float) -> None:
    """Encoding in the forward costs as well, and once."""
    graph = coded()
    problem = build_problem(graph, costs_of(graph))
    found = evaluate(problem, expand(problem, {problem.numbers[0, s] for s in storages_of(graph.regions[0], kept)}))
    assert ([nbytes / MIB for nbytes in found.during], found.seconds) == (moments, seconds)


def test_a_step_of_nothing_but_views_needs_what_is_outside() -> None:
    s = Sketch()
    graph = step(s.done((s.view(s.resident()),), {}), outside_bytes=100)
    problem = build_problem(graph, costs_of(graph))
    found = evaluate(problem, [])
    assert (found.during, found.peak_bytes) == ([], 100)
    assert smallest_peak(graph, costs_of(graph)) == (100, 100)
    with pytest.raises(BudgetTooSmall, match="100 B, set by code outside of any graph;"):
        make_plan(graph, costs_of(graph), step_budget=99, budget="")


def test_what_dies_is_written_over() -> None:
    assert during(elementwise(), keep=True) == [1, 1, 2, 3, 3, 3]


def test_applying_a_gradient_takes_room_where_it_leaves() -> None:
    graph = weight_first()
    roomy = tuple(5 * MIB if nbytes >= 0 else nbytes for nbytes in graph.regions[0].applied)
    peaks = []
    for item in (graph, with_region(graph, 0, applied=roomy)):
        region, costs = item.regions[0], costs_of(item)
        plan = Schedule((just_in_time(region, range(len(region.storages))),))
        check_schedule(item, plan)
        problem = build_problem(item, costs)
        peaks.append(replay(item, plan, costs).peak_bytes)
        assert evaluate(problem, expand(problem, set(problem.keepable))).peak_bytes == peaks[-1]
    assert peaks[1] - peaks[0] >= 4 * MIB
