"""The planner's fast evaluation against the replay of the events that just_in_time writes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradstow.ir import CostTable, StepGraph, check_schedule, replay
from gradstow.planner import _small
from gradstow.planner._evaluate import Order, Outcome, evaluate, expand
from gradstow.planner._moves import improve, prune, repair
from gradstow.planner._problem import Problem, build_problem
from gradstow.planner._solve import schedule_of
from graphs import HAND_MADE, MIB, chain, costs_of, with_op, with_region
from random_graphs import graphs_and_costs, random_costs, random_graph


def order_of(problem: Problem, seed: int) -> Order:
    """A random order: random kept storages, some of them dropped and made again in between, some reruns for nothing."""
    chooser = random.Random(seed)
    share = chooser.random()

    def some(part: float) -> set[int]:
        return {s for s in sorted(problem.keepable) if chooser.random() < part}

    without = {j: some(0.5) for j in range(len(problem.backward)) if chooser.random() < 0.3}
    order = expand(problem, some(share), without)
    again = sorted(problem.remaker.items())
    for _ in range(chooser.randint(0, 3) if again else 0):
        node = chooser.choice(again)[1]
        places = [i for i, (n, _) in enumerate(order) if n.region == node.region and node.region not in problem.shared]
        if places:
            order.insert(chooser.choice(places), (node, True))
    return order


def followed(
    graph: StepGraph, costs: CostTable, order: int | set[int], reuse: bool
) -> tuple[Outcome, list[int], float, int]:
    """What evaluate says; and of the replay the bytes while each op but a view runs, the seconds, the peak."""
    problem = build_problem(graph, costs)
    chosen = expand(problem, order) if isinstance(order, set) else order_of(problem, order)
    outcome = evaluate(problem, chosen, reuse=reuse)
    schedule = schedule_of(problem, chosen, reuse=reuse)
    check_schedule(graph, schedule)
    timeline = replay(graph, schedule, costs)
    real = [m for m in timeline.moments if m.op < 0 or not graph.regions[m.region].ops[m.op].view]
    lazy = [m.seconds for m in real if m.op >= 0 and not m.backward and graph.regions[m.region].ops[m.op].lazy]
    return outcome, [m.during_bytes for m in real], timeline.recompute_seconds + sum(lazy), timeline.peak_bytes


def moments(outcome: Outcome) -> list[int]:
    """Without what does not run."""
    return [nbytes for index, nbytes in enumerate(outcome.during) if index not in outcome.idle]


def same(outcome: Outcome, during: list[int], seconds: float, peak: int) -> bool:
    return moments(outcome) == during and outcome.peak_bytes == peak and abs(outcome.seconds - seconds) < 1e-9


def covers(outcome: Outcome, during: list[int], seconds: float, peak: int) -> bool:
    """Never below the replay, at any moment."""
    return (
        len(moments(outcome)) == len(during)
        and all(a >= b for a, b in zip(moments(outcome), during, strict=True))
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
        outcome = evaluate(problem, order_of(problem, seed), reuse=False)
        different += not same(outcome, *followed(graph, costs, seed, True)[1:])
    assert different >= 10


@given(graphs_and_costs(regions=2, ops=16), st.integers(0, 2**32), st.integers(0, 100))
def test_moves_do_what_they_say(drawn: tuple[StepGraph, CostTable], seed: int, percent: int) -> None:
    problem = build_problem(*drawn)
    start = evaluate(problem, order_of(problem, seed))
    budget = start.peak_bytes * percent // 100
    mended = repair(problem, start, budget, work=60)
    assert mended.excess(budget) <= start.excess(budget)
    better = improve(problem, mended, max(budget, mended.peak_bytes), work=60)
    assert better.seconds <= mended.seconds + 1e-12
    assert better.peak_bytes <= max(budget, mended.peak_bytes)
    again = evaluate(problem, better.order)
    assert (again.peak_bytes, again.seconds) == (better.peak_bytes, better.seconds)
    assert evaluate(problem, prune(problem, start.order)).seconds <= start.seconds


def test_repair_helps_in_large_problems() -> None:
    better = large = 0
    for seed in range(40):
        pick = random.Random(seed).randint
        graph = random_graph(pick, ops=60)
        problem = build_problem(graph, random_costs(pick, graph))
        if not any(True for _ in _small.outcomes(problem)):
            large += 1
            start = evaluate(problem, expand(problem, set(problem.keepable)))
            better += repair(problem, start, 0, work=100).peak_bytes < start.peak_bytes
    assert large >= 15
    assert better >= large // 2
