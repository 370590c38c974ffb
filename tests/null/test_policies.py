"""The classic strategies by name, and the narrow points between which they recompute."""

from __future__ import annotations

import pytest

from gradstow.errors import GradstowError, PolicyError
from gradstow.ir import StepGraph
from gradstow.planner import POLICIES, check_policy, make_plan
from gradstow.planner._policies import kept_by_policy, narrow_points
from gradstow.planner._problem import build_problem
from graphs import (
    HAND_MADE,
    MIB,
    Sketch,
    chain,
    costs_of,
    diamond,
    dropout,
    elementwise,
    step,
    storages_of,
    two_regions_and_loss,
)


def names(graph: StepGraph, numbers: set[int] | list[int]) -> list[str]:
    """Planner's storages as names of the values that they were made as."""
    problem = build_problem(graph, costs_of(graph))
    found = []
    for r, storage in (problem.names[n] for n in numbers):
        region = graph.regions[r]
        found.append(next(v.name for v in region.values if v.storage == storage))
    return found


def narrow(graph: StepGraph) -> list[str]:
    return names(graph, narrow_points(build_problem(graph, costs_of(graph))))


@pytest.mark.parametrize("name", POLICIES)
def test_known_names(name: str) -> None:
    assert check_policy(name) == name


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("store_all", "store-all"),
        ("storeall", "store-all"),
        ("recompute", "recompute-all"),
        ("recompute_all", "recompute-all"),
        ("sqrtn", "sqrt"),
        ("Auto", "auto"),
        ("", "auto or store-all or recompute-all or sqrt"),
        ("zzz", "auto or store-all or recompute-all or sqrt"),
        (None, "auto or store-all or recompute-all or sqrt"),
        (7, "auto or store-all or recompute-all or sqrt"),
    ],
)
def test_unknown_names_get_the_closest_known(name: object, close: str) -> None:
    with pytest.raises(PolicyError, match=rf"there is no policy {name!r}\. Did you mean {close}.*\?") as caught:
        check_policy(name)  # type: ignore[arg-type]
    assert isinstance(caught.value, (ValueError, GradstowError))


def test_make_plan_checks_the_name_first() -> None:
    graph = chain()
    with pytest.raises(PolicyError, match="Did you mean store-all"):
        make_plan(graph, costs_of(graph), step_budget=1, budget="1 B", policy="store-al")


def test_narrow_points_of_a_chain_are_all_its_values() -> None:
    assert narrow(chain(4)) == ["f1", "f2", "f3", "f4"]


def test_between_the_branches_of_a_diamond_it_is_not_narrow() -> None:
    assert narrow(diamond()) == ["f", "sum"]


def test_crumbs_do_not_count() -> None:
    def counted(nbytes: int) -> StepGraph:
        s = Sketch()
        x = s.resident()
        (counter,) = s.op("counter", (x,), (nbytes,))
        (f,) = s.op("f", (x,), (MIB,))
        (g,) = s.op("g", (f, counter), (MIB,))
        return step(s.done((g,), {}))

    assert narrow(counted(MIB // 256)) == ["f", "g"]
    assert narrow(counted(MIB // 256 + 1)) == ["counter", "g"]


def test_what_the_caller_holds_does_not_count() -> None:
    graph = chain(3)
    assert narrow(step(*graph.regions, outputs_held=True)) == ["f1", "f2"]


def test_a_value_that_spans_everything_leaves_no_narrow_point() -> None:
    s = Sketch()
    x = s.resident()
    (long,) = s.op("long", (x,), (MIB,))
    (f,) = s.op("f", (x,), (MIB,))
    (g,) = s.op("g", (f, long), (MIB,))
    (h,) = s.op("h", (g, long), (MIB,))
    assert narrow(step(s.done((h,), {}))) == ["long", "h"]


def test_kept_sets() -> None:
    graph = chain(9)
    problem = build_problem(graph, costs_of(graph))
    assert names(graph, kept_by_policy(problem, "recompute-all")) == []
    assert names(graph, sorted(kept_by_policy(problem, "store-all"))) == [f"f{i + 1}" for i in range(9)]
    # three of nine, at a quarter, a half and three quarters of nine seconds
    assert names(graph, sorted(kept_by_policy(problem, "sqrt"))) == ["f2", "f4", "f7"]


def test_sqrt_follows_the_seconds() -> None:
    graph = chain(9)
    problem = build_problem(graph, costs_of(graph, {"f1": 100.0}))
    assert names(graph, kept_by_policy(problem, "sqrt")) == ["f1"]


@pytest.mark.parametrize("name", HAND_MADE)
def test_policies_as_plans(name: str) -> None:
    graph = HAND_MADE[name]()
    costs = costs_of(graph)
    plans = {p: make_plan(graph, costs, step_budget=None, budget="none", policy=p) for p in POLICIES}
    assert plans["auto"].timeline == plans["store-all"].timeline
    assert plans["store-all"].rerun_ops == 0
    assert plans["store-all"].predicted_seconds == plans["store-all"].plain_seconds
    assert plans["recompute-all"].rerun_ops >= plans["sqrt"].rerun_ops
    assert {p: plan.policy for p, plan in plans.items()} == {p: p for p in POLICIES}


def test_recompute_all_keeps_what_cannot_be_made_again() -> None:
    graph = dropout()
    plan = make_plan(graph, costs_of(graph), step_budget=None, budget="none", policy="recompute-all")
    assert plan.schedule.regions[0].kept == storages_of(graph.regions[0], "bernoulli")


def test_plain_writes_nothing_over() -> None:
    graph = elementwise()
    plan = make_plan(graph, costs_of(graph), step_budget=None, budget="none")
    assert plan.plain_step_peak_bytes == 4 * MIB
    assert plan.predicted_step_peak_bytes == 3 * MIB


def test_a_loss_outside_the_model_recomputes_nothing() -> None:
    graph = two_regions_and_loss()
    plan = make_plan(graph, costs_of(graph), step_budget=None, budget="none", policy="recompute-all")
    assert [m.region for m in plan.timeline.moments if m.recompute] == [1, 0]
