"""Plans for budgets on graphs that can be solved by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from gradstow.errors import BudgetTooSmall
from gradstow.ir import CostTable, OpCost, PlanData, Resident, SpecError, StepGraph, write_events
from gradstow.planner import _solve, make_plan, plain_step_peak
from gradstow.planner._evaluate import Outcome, evaluate
from graphs import (
    HAND_MADE,
    MIB,
    Sketch,
    chain,
    costs_of,
    dropout,
    elementwise,
    multi_output,
    step,
    storages_of,
    two_regions_and_loss,
)


def planned(graph: StepGraph, budget: int | None, costs: CostTable | None = None) -> PlanData:
    return make_plan(graph, costs or costs_of(graph), step_budget=budget, budget="test")


def refusal(graph: StepGraph, budget: int, costs: CostTable | None = None) -> BudgetTooSmall:
    with pytest.raises(BudgetTooSmall) as caught:
        planned(graph, budget, costs)
    return caught.value


def pyramid() -> StepGraph:
    """Three ops whose values are of 1, 2 and 4 MiB; each is read once in the backward, from the last to the first."""
    s = Sketch()
    x, w = s.resident(), s.resident()
    (f1,) = s.op("f1", (x,), (MIB,))
    (f2,) = s.op("f2", (x,), (2 * MIB,))
    (f3,) = s.op("f3", (x,), (4 * MIB,))
    (out,) = s.op("out", (f1, f2, f3), (MIB,))
    t = s.tangent()
    (b3,) = s.op("b3", (t, f3), (MIB,), backward=True)
    (b2,) = s.op("b2", (b3, f2), (MIB,), backward=True)
    (b1,) = s.op("b1", (b2, f1), (MIB,), backward=True)
    return step(s.done((out,), {w: b1}))


def test_nothing_is_made_again_where_everything_fits() -> None:
    graph = pyramid()
    plan = planned(graph, 9 * MIB)
    assert (plan.rerun_ops, plan.solver["solver"]) == (0, "store-all")
    assert plan.schedule.regions[0].kept == storages_of(graph.regions[0], "f1", "f2", "f3")


@pytest.mark.parametrize(("cheap", "dear"), [("f1", "f2"), ("f2", "f1")])
def test_the_cheapest_value_is_given_up(cheap: str, dear: str) -> None:
    graph = pyramid()
    plan = planned(graph, 8 * MIB, costs_of(graph, {cheap: 1.0, dear: 5.0}))
    assert plan.schedule.regions[0].kept == storages_of(graph.regions[0], dear, "f3")
    assert plan.timeline.recompute_seconds == 1.0
    assert plan.plain_seconds <= plan.lower_bound_seconds <= plan.predicted_seconds


def test_plans_carry_what_they_were_made_from() -> None:
    graph, costs = chain(), costs_of(chain())
    plan = planned(graph, 10 * MIB, costs)
    assert (plan.graph, plan.costs, plan.budget, plan.policy) == (graph, costs, "test", "auto")
    assert plan.plain_step_peak_bytes == plain_step_peak(graph, costs)
    assert plan.lower_bound_seconds <= plan.predicted_seconds


def test_a_class_of_ones_own() -> None:
    class Mine(PlanData):
        pass

    assert type(make_plan(chain(), costs_of(chain()), step_budget=None, budget="", kind=Mine)) is Mine


@pytest.mark.parametrize("name", HAND_MADE)
def test_the_minimum_is_met_and_one_byte_less_is_refused(name: str) -> None:
    graph = replace(HAND_MADE[name](), resident=Resident(parameters=10 * MIB, batch=3))
    error = refusal(graph, 1)
    resident = graph.resident.total
    assert error.budget_bytes == 1 + resident
    step_budget = error.minimum_bytes - resident
    plan = planned(graph, step_budget)
    assert plan.predicted_step_peak_bytes == step_budget
    assert plan.predicted_peak_bytes == error.minimum_bytes
    below = refusal(graph, step_budget - 1)
    assert below.minimum_bytes == error.minimum_bytes


@pytest.mark.parametrize("name", HAND_MADE)
def test_the_minimum_has_room_for_the_optimizers_step(name: str) -> None:
    graph = replace(HAND_MADE[name](), resident=Resident(parameters=10 * MIB), optimizer_peak_bytes=100 * MIB)
    error = refusal(graph, 1)
    assert "optimizer.step needs" in str(error)
    plan = planned(graph, error.minimum_bytes - graph.resident.total)
    assert plan.predicted_peak_bytes == error.minimum_bytes
    assert refusal(graph, error.minimum_bytes - graph.resident.total - 1).minimum_bytes == error.minimum_bytes


@pytest.mark.parametrize(
    ("make", "peak", "culprit"),
    [
        (chain, 6 * MIB, r"b2 \(no source line\), with b3\.0 of 1\.0 MiB"),
        (dropout, 4 * MIB + MIB // 4, r"with .* of 1\.0 MiB"),
        (elementwise, 3 * MIB, r"of 1\.0 MiB"),
        (multi_output, 8 * MIB, r"bpool \(no source line\), with bpool of 4\.0 MiB"),
    ],
)
def test_the_refusal_names_the_minimum_and_what_sets_it(make: Callable[[], StepGraph], peak: int, culprit: str) -> None:
    error = refusal(make(), MIB)
    assert error.minimum_bytes == peak
    text = str(error)
    assert f"The smallest budget is {peak} bytes" in text
    assert text.endswith("Give at least that, or use a smaller batch.")
    with pytest.raises(BudgetTooSmall, match=f"set by .*{culprit}"):
        raise error
    assert isinstance(error, ValueError)


def test_the_refusal_names_module_and_line() -> None:
    graph = multi_output()
    ops = tuple(replace(op, module="layer1.pool", source="net.py:7") for op in graph.regions[0].ops)
    error = refusal(step(replace(graph.regions[0], ops=ops)), MIB)
    assert "bpool in layer1.pool (net.py:7), with bpool of 4.0 MiB" in str(error)


def test_the_refusal_names_the_reserve() -> None:
    graph = step(*chain(2).regions, reserve_bytes=100 * MIB)
    error = refusal(graph, MIB)
    assert "set by the room reserved for the loss" in str(error)
    assert error.minimum_bytes == 101 * MIB


def test_a_graph_whose_backward_reads_nothing_of_the_forward() -> None:
    s = Sketch()
    x, w = s.resident(), s.resident()
    (f,) = s.op("f", (x, w), (4 * MIB,))
    t = s.tangent(4 * MIB)
    (b,) = s.op("b", (t, x), (MIB,), backward=True)
    graph = step(s.done((f,), {w: b}))
    assert planned(graph, 5 * MIB).rerun_ops == 0
    assert refusal(graph, 5 * MIB - 1).minimum_bytes == 5 * MIB


def test_a_graph_of_nothing_but_views() -> None:
    s = Sketch()
    graph = step(s.done((s.view(s.resident()),), {}))
    assert planned(graph, 0).predicted_step_peak_bytes == 0


def test_a_policy_that_does_not_fit_is_refused_by_name() -> None:
    graph = chain()
    with pytest.raises(BudgetTooSmall, match="the policy 'store-all' needs 6.0 MiB .* Use policy='auto'") as caught:
        make_plan(graph, costs_of(graph), step_budget=4 * MIB, budget="", policy="store-all")
    assert caught.value.minimum_bytes == 6 * MIB


def test_optimizer_step_counts() -> None:
    graph = replace(chain(), optimizer_peak_bytes=100 * MIB)
    assert planned(graph, 103 * MIB).predicted_peak_bytes == 103 * MIB  # three gradients beside it
    with pytest.raises(BudgetTooSmall, match=r"optimizer\.step needs 103\.0 MiB.*foreach=False") as caught:
        planned(graph, 103 * MIB - 1)
    assert caught.value.minimum_bytes == 103 * MIB
    (region,) = graph.regions
    added = replace(graph, regions=(replace(region, added=region.accumulated),), outputs_held=True)
    assert planned(added, None).optimizer_bytes == 101 * MIB  # the output that the caller holds


def test_unknown_costs_are_never_made_again() -> None:
    graph = pyramid()
    table = dict(costs_of(graph, {"f1": 1.0, "f2": 5.0}).costs)
    table["region 0 f1"] = OpCost(0.0, 0, "unknown")
    plan = planned(graph, 8 * MIB, CostTable(table))
    assert plan.schedule.regions[0].kept == storages_of(graph.regions[0], "f1", "f3")


def test_regions_that_run_one_graph_decide_alike() -> None:
    graph = two_regions_and_loss(held=False)
    first, last = graph.regions[0], graph.regions[2]
    second = replace(
        first,
        storages=(
            replace(first.storages[0], kind=graph.regions[1].storages[0].kind, origin=(0, 3)),
            *first.storages[1:],
        ),
        accumulated=(False, True),
        gradients=(-1, *first.gradients[1:]),
    )
    storages = (replace(last.storages[0], nbytes=MIB, origin=(1, 3)), *last.storages[1:])
    twins = tuple(replace(r, fingerprint="same") for r in (first, second))
    graph = step(*twins, replace(last, storages=storages))
    costs = costs_of(graph)
    error = refusal(graph, 1, costs)
    for budget in range(error.minimum_bytes, 20 * MIB, MIB // 2):
        plan = planned(graph, budget, costs)
        f = storages_of(first, "f")[0]
        assert (f in plan.schedule.regions[0].kept) == (f in plan.schedule.regions[1].kept)


def test_what_is_handed_out_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """make_plan runs the spec over its own schedule."""

    @dataclass
    class Broken:
        def __call__(self, *args: object, **kwargs: object) -> object:
            plan = write_events(*args, **kwargs)  # type: ignore[arg-type]
            return replace(plan, backward=plan.backward[:-2])

    monkeypatch.setattr(_solve, "write_events", Broken())
    with pytest.raises(SpecError, match="never runs"):
        planned(chain(), None)


def test_the_same_input_gives_the_same_text() -> None:
    graph = two_regions_and_loss()
    costs = costs_of(graph)
    budget = refusal(graph, 1, costs).minimum_bytes
    assert planned(graph, budget, costs).dumps() == planned(graph, budget, costs).dumps()
    assert planned(graph, budget, costs).dumps() != planned(graph, budget + 20 * MIB, costs).dumps()


@pytest.mark.parametrize("name", HAND_MADE)
def test_more_budget_never_costs_more_seconds(name: str) -> None:
    graph = HAND_MADE[name]()
    lowest, seconds = refusal(graph, 1).minimum_bytes, math.inf
    for budget in range(lowest, lowest + 8 * MIB, MIB // 4):
        plan = planned(graph, budget)
        assert plan.predicted_seconds <= seconds
        seconds = plan.predicted_seconds
    assert seconds == plan.plain_seconds


@pytest.mark.parametrize("name", HAND_MADE)
def test_where_an_evaluation_falls_short_the_replay_decides(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On several regions an order may replay some bytes higher than it was evaluated: budgets are met all the same."""

    def short(*args: object, **options: object) -> Outcome:
        found = evaluate(*args, **options)  # type: ignore[arg-type]
        return replace(found, peak_bytes=found.peak_bytes - 8, during=[nbytes - 8 for nbytes in found.during])

    for module in ("greedy", "minimum", "moves", "search", "small", "solve"):
        monkeypatch.setattr(f"gradstow.planner._{module}.evaluate", short)
    graph = HAND_MADE[name]()
    least = refusal(graph, 1).minimum_bytes - graph.resident.total
    highest = plain_step_peak(graph, costs_of(graph))
    for budget in {least, (least + highest) // 2, highest}:
        assert planned(graph, budget).timeline.peak_bytes <= budget
