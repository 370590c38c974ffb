"""On random graphs and schedules the two replayers agree, and what just_in_time writes is legal."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gradstow.ir import CostTable, Schedule, StepGraph, StorageKind, check_schedule, replay
from mutations import account, expected, random_schedule
from random_graphs import graphs_and_costs, random_costs, random_graph
from replayer import Ledger


@given(graphs_and_costs(regions=4), st.integers(0, 2**32), st.booleans(), st.booleans())
def test_both_replayers_agree(drawn: tuple[StepGraph, CostTable], seed: int, reuse: bool, plain: bool) -> None:
    graph, costs = drawn
    schedule = random_schedule(graph, random.Random(seed), reuse=reuse)
    check_schedule(graph, schedule)
    assert account(replay(graph, schedule, costs, plain=plain)) == expected(Ledger(graph, schedule, costs, plain))


@given(graphs_and_costs(regions=4), st.integers(0, 2**32))
def test_gradients_that_are_applied_inside_the_backward(drawn: tuple[StepGraph, CostTable], seed: int) -> None:
    graph, costs = drawn
    assume(any(any(r.added) for r in graph.regions))
    chooser = random.Random(seed)
    regions = [
        replace(r, applied=tuple(chooser.randint(0, 3000) if a and chooser.random() < 0.7 else -1 for a in r.added))
        for r in graph.regions
    ]
    graph = replace(graph, regions=tuple(regions))
    schedule = random_schedule(graph, chooser, reuse=chooser.random() < 0.5)
    check_schedule(graph, schedule)
    assert account(replay(graph, schedule, costs)) == expected(Ledger(graph, schedule, costs))


@pytest.mark.parametrize("seed", range(8))
def test_larger_graphs(seed: int) -> None:
    chooser = random.Random(seed)
    graph = random_graph(chooser.randint, regions=6, ops=40)
    costs = random_costs(chooser.randint, graph)
    for plain in (False, True):
        schedule = random_schedule(graph, chooser, reuse=not plain)
        check_schedule(graph, schedule)
        assert account(replay(graph, schedule, costs, plain=plain)) == expected(Ledger(graph, schedule, costs, plain))


@given(graphs_and_costs(regions=4), st.integers(0, 2**32))
def test_what_is_alive_at_each_moment_adds_up(drawn: tuple[StepGraph, CostTable], seed: int) -> None:
    graph, costs = drawn
    timeline = replay(graph, random_schedule(graph, random.Random(seed), reuse=True), costs)
    assume(timeline.moments)
    during = [m.during_bytes for m in timeline.moments]
    assert timeline.peak_index == during.index(max(during))
    for index, moment in enumerate(timeline.moments):
        alive = [graph.regions[life.region].storages[life.storage] for life in timeline.alive(index)]
        assert all(s.kind is not StorageKind.RESIDENT and s.origin is None for s in alive)
        assert graph.outside_bytes + sum(s.nbytes for s in alive) == moment.after_bytes


@given(graphs_and_costs(regions=4), st.integers(0, 2**32), st.booleans())
def test_plans_come_back_from_json(drawn: tuple[StepGraph, CostTable], seed: int, reuse: bool) -> None:
    graph, costs = drawn
    schedule = random_schedule(graph, random.Random(seed), reuse=reuse)
    assert StepGraph.from_json(graph.to_json()) == graph
    assert Schedule.from_json(schedule.to_json()) == schedule
    assert CostTable.from_json(costs.to_json()) == costs
