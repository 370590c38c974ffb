"""The planner's fast evaluation against the replay of the events that just_in_time writes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradstow.ir import CostTable, StepGraph, check_schedule, replay
from gradstow.planner import _evaluate
from gradstow.planner._evaluate import Outcome, evaluate
from gradstow.planner._local import improve, is_small
from gradstow.planner._problem import Problem, build_problem
from gradstow.planner._solve import _by_region, _events
from graphs import HAND_MADE, MIB, chain, costs_of, graphs_and_costs, random_costs, random_graph, with_op, with_region


def kept_of(problem: Problem, seed: int) -> set[int]:
    chooser = random.Random(seed)
    share = chooser.random()
    return {s for s in sorted(problem.keepable) if chooser.random() < share}


def followed(
    graph: StepGraph, costs: CostTable, kept: int | set[int], reuse: bool
) -> tuple[Outcome, list[int], float, int]:
    """What evaluate says; and of the replay the bytes while each op but a view runs, the seconds, the peak."""
    problem = build_problem(graph, costs)
    kept = kept if isinstance(kept, set) else kept_of(problem, kept)
    outcome = evaluate(problem, kept, reuse=reuse)
    schedule = _events(graph, _by_region(problem, outcome.kept), reuse=reuse)
    check_schedule(graph, schedule)
    timeline = replay(graph, schedule, costs)
    real = [m for m in timeline.moments if m.op < 0 or not graph.regions[m.region].ops[m.op].view]
    return outcome, [m.during_bytes for m in real], timeline.recompute_seconds, timeline.peak_bytes


def same(outcome: Outcome, during: list[int], seconds: float, peak: int) -> bool:
    return outcome.during == during and outcome.peak_bytes == peak and abs(outcome.seconds - seconds) < 1e-9


def covers(outcome: Outcome, during: list[int], seconds: float, peak: int) -> bool:
    """Never below the replay, at any moment."""
    return (
        len(outcome.during) == len(during)
        and all(a >= b for a, b in zip(outcome.during, during, strict=True))
        and outcome.peak_bytes >= peak
        and abs(outcome.seconds - seconds) < 1e-9
    )


@given(graphs_and_costs(regions=1), st.integers(0, 2**32), st.booleans())
def test_one_region_is_exact(drawn: tuple[StepGraph, CostTable], seed: int, reuse: bool) -> None:
    assert same(*followed(*drawn, seed, reuse))


@given(graphs_and_costs(regions=4), st.integers(0, 2**32), st.booleans())
def test_several_regions_are_never_underestimated(drawn: tuple[StepGraph, CostTable], seed: int, reuse: bool) -> None:
    assert covers(*followed(*drawn, seed, reuse))


@pytest.mark.parametrize("name", HAND_MADE)
@pytest.mark.parametrize("reuse", [True, False])
def test_hand_made_graphs_are_exact(name: str, reuse: bool) -> None:
    graph = HAND_MADE[name]()
    costs = costs_of(graph, {"a": 0.5}, {"a": 5 * MIB, "g": 7})
    storages = build_problem(graph, costs).keepable
    for kept in ({s for s in storages if s % 2}, {s for s in storages if not s % 2}, set(), set(storages)):
        assert same(*followed(graph, costs, kept, reuse))


def test_an_output_that_the_caller_holds_is_kept_for_nothing() -> None:
    """Also where the region as a whole is not held: its other outputs may lie between regions."""
    graph = with_op(chain(2), 0, "b2", inputs=(5, 3, 4, 2))  # reads the output as well
    graph = replace(graph, outputs_held=True)
    outcome, *rest = followed(graph, costs_of(graph), set(), True)
    assert same(outcome, *rest)
    assert outcome.seconds == 1.0, "only f1 is made again"


@pytest.mark.parametrize("name", ["elementwise", "dropout", "batch_norm", "shared_gradient"])
def test_unmanaged_regions_write_over_nothing(name: str) -> None:
    graph = with_region(HAND_MADE[name](), 0, managed=False)
    assert same(*followed(graph, costs_of(graph), set(), True))


def test_several_regions_are_mostly_exact() -> None:
    """What is overestimated needs a region whose backward runs no op."""
    exact = 0
    for seed in range(100):
        pick = random.Random(seed).randint
        graph = random_graph(pick, regions=4)
        exact += same(*followed(graph, random_costs(pick, graph), seed, True))
    assert exact >= 95


def spoiled(how: Callable[[Outcome], Outcome]) -> tuple[int, int]:
    """How often the two comparisons accept outcomes that were changed."""
    accepted = [0, 0]
    for seed in range(20):
        pick = random.Random(seed).randint
        graph = random_graph(pick)
        outcome, *rest = followed(graph, random_costs(pick, graph), seed, True)
        if outcome.during:
            accepted[0] += same(how(outcome), *rest)
            accepted[1] += covers(how(outcome), *rest)
    return accepted[0], accepted[1]


def test_the_comparisons_see_a_difference() -> None:
    assert spoiled(lambda o: replace(o, during=[o.during[0] + 1, *o.during[1:]]))[0] == 0
    assert spoiled(lambda o: replace(o, during=[o.during[0] - 1, *o.during[1:]])) == (0, 0)
    assert spoiled(lambda o: replace(o, during=o.during[:-1])) == (0, 0)
    assert spoiled(lambda o: replace(o, peak_bytes=o.peak_bytes - 1)) == (0, 0)
    assert spoiled(lambda o: replace(o, seconds=o.seconds + 0.001)) == (0, 0)


def test_the_exact_test_fails_where_reuse_is_forgotten() -> None:
    """On graphs where something is written over, an evaluation without reuse is not taken for the one with."""
    different = 0
    for seed in range(60):
        pick = random.Random(seed).randint
        graph = random_graph(pick)
        costs = random_costs(pick, graph)
        problem = build_problem(graph, costs)
        outcome = _evaluate.evaluate(problem, kept_of(problem, seed), reuse=False)
        different += not same(outcome, *followed(graph, costs, seed, True)[1:])
    assert different >= 10


@given(graphs_and_costs(regions=2, ops=16), st.integers(0, 2**32), st.integers(0, 100))
def test_local_search_never_makes_it_worse(drawn: tuple[StepGraph, CostTable], seed: int, percent: int) -> None:
    problem = build_problem(*drawn)
    start = evaluate(problem, kept_of(problem, seed))
    budget = start.peak_bytes * percent // 100
    better = improve(problem, start, budget, work=60)
    assert max(better.peak_bytes - budget, 0) <= max(start.peak_bytes - budget, 0)
    if start.peak_bytes <= budget:
        assert better.seconds <= start.seconds + 1e-12
    again = evaluate(problem, better.kept)
    assert (again.peak_bytes, again.seconds) == (better.peak_bytes, better.seconds)


def test_local_search_helps_in_large_problems() -> None:
    better = large = 0
    for seed in range(40):
        pick = random.Random(seed).randint
        graph = random_graph(pick, ops=60)
        problem = build_problem(graph, random_costs(pick, graph))
        if not is_small(problem):
            large += 1
            start = evaluate(problem, set(problem.keepable))
            better += improve(problem, start, 0).peak_bytes < start.peak_bytes
    assert large >= 15
    assert better >= large // 2
