"""Plans of random graphs: legal, under budget, and on small graphs as good as trying everything."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gradstow.errors import BudgetTooSmall
from gradstow.ir import CostTable, Op, PlanData, Schedule, StepGraph, Timeline, check_schedule, just_in_time, replay
from gradstow.planner import make_plan
from gradstow.planner._problem import build_problem
from graphs import MIB
from random_graphs import graphs_and_costs, random_costs, random_graph
from replayer import Ledger

GAP = 0.005  # the solver's
VALUES = 8


@dataclass(frozen=True)
class Tried:
    """Every kept set of a graph of one region: (peak, seconds added) as replayed."""

    outcomes: tuple[tuple[int, float], ...]

    def seconds(self, budget: int) -> float:
        """The least that fits."""
        return min(seconds for peak, seconds in self.outcomes if peak <= budget)

    def budgets(self) -> list[int]:
        """Those at which something changes: where another kept set begins to fit."""
        return sorted({peak for peak, _ in self.outcomes})


def try_everything(graph: StepGraph, costs: CostTable) -> Tried | None:
    """None where there are too many values."""
    (region,) = graph.regions
    problem = build_problem(graph, costs)
    values = sorted(problem.names[n][1] for n in problem.keepable - problem.held)
    held = {problem.names[n][1] for n in problem.held}
    if len(values) > VALUES:
        return None
    outcomes = set()
    for choice in range(2 ** len(values)):
        kept = held | {s for i, s in enumerate(values) if choice >> i & 1}
        timeline = replay(graph, Schedule((just_in_time(region, kept),)), costs)
        outcomes.add((timeline.peak_bytes, added(graph, timeline)))
    return Tried(tuple(sorted(outcomes)))


def added(graph: StepGraph, timeline: Timeline) -> float:
    """Seconds of recomputation, and of what runs in the forward only for its sake."""
    forward = [m for m in timeline.moments if m.op >= 0 and not m.backward]
    lazy = [m.seconds for m in forward if graph.regions[m.region].ops[m.op].lazy]
    return timeline.recompute_seconds + sum(lazy)


def as_plain(graph: StepGraph) -> StepGraph:
    """The graph with every op in its plain form."""

    def plain(op: Op) -> Op:
        return op if op.plain is None else replace(op, inputs=op.plain.inputs, plain=None)

    return replace(graph, regions=tuple(replace(r, ops=tuple(map(plain, r.ops))) for r in graph.regions))


def planned(graph: StepGraph, costs: CostTable, budget: int) -> PlanData:
    return make_plan(graph, costs, step_budget=budget, budget=f"{budget} B")


def as_good(plan: PlanData, tried: Tried, budget: int) -> bool:
    """Fits, and costs what the best kept set costs within the solver's gap; its bound is a bound."""
    best = tried.seconds(budget)
    return (
        plan.predicted_step_peak_bytes <= budget
        and added(plan.graph, plan.timeline) <= best * (1 + GAP) + 1e-9
        and plan.lower_bound_seconds <= plan.predicted_seconds + 1e-9
    )


def lowest(graph: StepGraph, costs: CostTable) -> int:
    """The smallest step budget that make_plan says it can meet."""
    try:
        planned(graph, costs, 0)
    except BudgetTooSmall as error:
        return error.minimum_bytes - graph.resident.total
    return 0


small = graphs_and_costs(regions=1, ops=5, unit=MIB, plain_sizes=False)


def check_all_budgets(graph: StepGraph, costs: CostTable) -> bool:
    """Whether there are few enough values to try; then at every budget where something changes."""
    tried = try_everything(graph, costs)
    if tried is None:
        return False
    before = float("inf")
    for budget in [*tried.budgets(), tried.budgets()[-1] + 1]:
        plan = planned(graph, costs, budget)
        assert as_good(plan, tried, budget)
        assert plan.predicted_seconds <= before + 1e-9, "more budget costs more time"
        before = plan.predicted_seconds
    return True


@settings(max_examples=60)
@given(small)
def test_as_good_as_trying_everything(drawn: tuple[StepGraph, CostTable]) -> None:
    assume(check_all_budgets(*drawn))


def test_as_good_as_trying_everything_on_many() -> None:
    checked = 0
    for seed in range(150):
        pick = random.Random(seed).randint
        graph = random_graph(pick, ops=6, unit=MIB, plain_sizes=False)
        checked += check_all_budgets(graph, random_costs(pick, graph, unit=MIB // 4))
    assert checked >= 100


@settings(max_examples=40)
@given(small)
def test_the_minimum_is_the_lowest_peak_of_all(drawn: tuple[StepGraph, CostTable]) -> None:
    tried = try_everything(*drawn)
    assume(tried is not None)
    assert tried is not None
    assert lowest(*drawn) <= tried.budgets()[0], "making a value several times may reach below"


def test_a_plan_that_is_not_the_best_is_seen() -> None:
    seen = tried_graphs = 0
    for seed in range(100):
        pick = random.Random(seed).randint
        graph = random_graph(pick, ops=5, unit=MIB, plain_sizes=False)
        costs = random_costs(pick, graph, unit=MIB)
        tried = try_everything(graph, costs)
        if tried is None or tried.seconds(tried.budgets()[0]) == tried.seconds(tried.budgets()[-1]):
            continue
        tried_graphs += 1
        tight, wide = tried.budgets()[0], tried.budgets()[-1]
        lean, rich = planned(graph, costs, tight), planned(graph, costs, wide)
        assert as_good(lean, tried, tight)
        assert as_good(rich, tried, wide)
        assert not as_good(lean, tried, wide), "it makes again what would fit"
        assert not as_good(rich, tried, tight), "it does not fit"
        seen += 1
    assert tried_graphs >= 10
    assert seen == tried_graphs


@settings(max_examples=40)
@given(graphs_and_costs(regions=3, ops=8, unit=MIB), st.integers(0, 100))
def test_every_plan_is_legal_and_under_budget(drawn: tuple[StepGraph, CostTable], percent: int) -> None:
    graph, costs = drawn
    low = lowest(graph, costs)
    high = make_plan(graph, costs, step_budget=None, budget="none").predicted_step_peak_bytes
    budget = low + (max(high - low, 0)) * percent // 100
    plan = planned(graph, costs, budget)
    check_schedule(graph, plan.schedule)
    check_schedule(as_plain(graph), plan.plain)
    assert plan.predicted_step_peak_bytes <= budget
    assert max(Ledger(graph, plan.schedule, costs).during(), default=0) == plan.predicted_step_peak_bytes
    assert plan.lower_bound_seconds <= plan.predicted_seconds + 1e-9
    assert plan.predicted_seconds == pytest.approx(plan.plain_seconds + added(graph, plan.timeline))


@settings(max_examples=30)
@given(graphs_and_costs(regions=3, ops=8, unit=MIB), st.integers(0, 100))
def test_the_same_input_gives_the_same_text(drawn: tuple[StepGraph, CostTable], percent: int) -> None:
    graph, costs = drawn
    low = lowest(graph, costs)
    budget = low + low * percent // 100
    text = planned(graph, costs, budget).dumps()
    assert planned(StepGraph.from_json(graph.to_json()), costs, budget).dumps() == text
    again = PlanData.loads(text)
    assert again.timeline == planned(graph, costs, budget).timeline


@pytest.mark.parametrize("policy", ["store-all", "recompute-all", "sqrt"])
@settings(max_examples=30)
@given(drawn=graphs_and_costs(regions=3, ops=10))
def test_policies_are_legal(policy: str, drawn: tuple[StepGraph, CostTable]) -> None:
    graph, costs = drawn
    plan = make_plan(graph, costs, step_budget=None, budget="none", policy=policy)
    check_schedule(graph, plan.schedule)
    if policy == "store-all":
        assert plan.rerun_ops == 0
    else:
        store_all = make_plan(graph, costs, step_budget=None, budget="none", policy="store-all")
        # sums of the same numbers in another order
        assert plan.predicted_seconds >= store_all.predicted_seconds - 1e-12
