"""The classic strategies by name, and the narrow points between which they recompute."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradstow.errors import BudgetTooSmall, GradstowError, PolicyError
from gradstow.ir import StepGraph
from gradstow.planner import POLICIES, Policy, make_plan
from gradstow.planner._policies import kept_by_policy, narrow_points
from gradstow.planner._problem import build_problem
from graphs import (
    HAND_MADE,
    MIB,
    Sketch,
    chain,
    coded,
    costs_of,
    diamond,
    dropout,
    elementwise,
    kept_as_code,
    script,
    step,
    storages_of,
    two_regions_and_loss,
    with_region,
    with_storage,
)
from shapes import residual, skip


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
    assert str(Policy.of(name)) == name


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("store_all", "store-all"),
        ("storeall", "store-all"),
        ("recompute", "recompute-all"),
        ("recompute_all", "recompute-all"),
        ("sqrtn", "sqrt"),
        ("Auto", "auto"),
    ],
)
def test_unknown_names_get_the_closest_known(name: str, close: str) -> None:
    with pytest.raises(PolicyError, match=rf"there is no policy {name!r}\. Did you mean {close}.*\?") as caught:
        Policy.of(name)
    assert isinstance(caught.value, (ValueError, GradstowError))


@pytest.mark.parametrize("name", ["", "zzz", None, 7, ["auto"]])
def test_what_is_no_policy_says_how_to_write_one(name: object) -> None:
    with pytest.raises(PolicyError, match=r'policy.*Write a name \("auto"'):
        Policy.of(name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "policy",
    [Policy("sqrt"), Policy(rules=(("relu", "recompute"), ("layer3.*", "store"))), Policy("sqrt", (("mm", "store"),))],
)
def test_a_policy_is_read_from_its_own_text(policy: Policy) -> None:
    assert Policy.of(str(policy)) == policy
    assert Policy.of(policy) is policy


def test_a_policy_has_one_name() -> None:
    with pytest.raises(PolicyError, match="two names, sqrt and store-all"):
        Policy.of("sqrt,relu=store,store-all")
    assert Policy.of("sqrt,mm=store,sqrt").name == "sqrt"
    assert Policy.of("b[ou]dy*=store,[]]=store,x]=store").name == "auto"


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


def test_sqrt_keeps_nothing_where_nothing_is_narrow() -> None:
    """Two values are alive from the first op to the last."""
    s = Sketch()
    x, w = s.resident(), s.resident()
    one, two = s.op("pair", (x,), (MIB, MIB))
    (b,) = s.op("b", (s.tangent(), one, two), (MIB,), backward=True)
    graph = step(s.done((one, two), {w: b}))
    problem = build_problem(graph, costs_of(graph))
    assert narrow_points(problem) == []
    assert kept_by_policy(problem, "sqrt") == set()


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


STRATEGIES = {
    ("chain", "store-all"): ("f1 f2 f3 f4", "b4 -t -f3 b3 -b4.0 -f2 b2 -b3.0 -f1 b1 -b2.0"),
    ("chain", "recompute-all"): (
        "f1 f2 -f1 f3 -f2 f4 -f3",
        "f1 f2 f3 b4 -t -f3 b3 -b4.0 -f2 b2 -b3.0 -f1 b1 -b2.0",
    ),
    ("chain", "sqrt"): ("f1 f2 f3 -f2 f4", "b4 -t -f3 f2 b3 -b4.0 -f2 b2 -b3.0 -f1 b1 -b2.0"),
    ("residual", "store-all"): (
        "f1 a1 -f1 f2 a2 -f2 f3 a3 -f3",
        "b3 -a2 s3 -t -b3.0 b2 -a1 s2 -s3 -b2.0 b1 -s2",
    ),
    ("residual", "recompute-all"): (
        "f1 a1 -f1 f2 a2 -a1 -f2 f3 a3 -a2 -f3",
        "f1 a1 -f1 f2 a2 -f2 b3 -a2 s3 -t -b3.0 b2 -a1 s2 -s3 -b2.0 b1 -s2",
    ),
    ("residual", "sqrt"): (
        "f1 a1 -f1 f2 a2 -f2 f3 a3 -f3",
        "b3 -a2 s3 -t -b3.0 b2 -a1 s2 -s3 -b2.0 b1 -s2",
    ),
    ("skip", "store-all"): ("f1 f2 f3 f4", "b4 -t -f3 b3 -b4.0 -f2 b2 -b3.0 -f1 join -b2.0 -b4.1 b1 -join"),
    ("skip", "recompute-all"): (
        "f1 f2 f3 -f2 f4 -f3 -f1",
        "f1 f2 f3 b4 -t -f3 b3 -b4.0 -f2 b2 -b3.0 -f1 join -b2.0 -b4.1 b1 -join",
    ),
    ("skip", "sqrt"): (
        "f1 f2 f3 -f2 f4 -f3",
        "f2 f3 b4 -t -f3 b3 -b4.0 -f2 b2 -b3.0 -f1 join -b2.0 -b4.1 b1 -join",
    ),
}


@pytest.mark.parametrize(("kind", "policy"), STRATEGIES)
def test_the_events_of_the_classic_strategies(kind: str, policy: str) -> None:
    graph = {"chain": chain(4), "residual": residual(), "skip": skip()}[kind]
    plan = make_plan(graph, costs_of(graph), step_budget=None, budget="none", policy=policy)
    region, schedule = graph.regions[0], plan.schedule.regions[0]
    forward, backward = STRATEGIES[kind, policy]
    assert schedule.forward == script(region, forward)
    assert schedule.backward == script(region, backward)


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


# ------------------------------------------------------------------------------------------------------ rules


def named_chain(length: int = 4) -> StepGraph:
    """chain() as layers "body.0", "body.1", ... whose ops are relu and addmm in turn."""
    graph = chain(length)
    for name in (f"f{i + 1}" for i in range(length)):
        graph = with_storage(graph, 0, storages_of(graph.regions[0], name)[0], nbytes=4 * MIB)
    ops = []
    for i, op in enumerate(graph.regions[0].ops):
        target = ("aten.relu.default", "aten.addmm.default")[i % 2]
        ops.append(replace(op, target=target, module=f"body.{i}") if not op.backward else op)
    return with_region(graph, 0, ops=tuple(ops))


def kept_under(policy: object, budget: int | None = None) -> list[str]:
    graph = named_chain()
    plan = make_plan(graph, costs_of(graph), step_budget=budget, budget="", policy=policy)  # type: ignore[arg-type]
    storages = plan.schedule.regions[0].kept
    return [v.name for v in graph.regions[0].values if v.storage in storages]


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({"relu": "recompute"}, ["f2"]),
        ({"linear": "recompute"}, ["f1", "f3"]),
        ({"addmm": "recompute", "body.1": "store"}, ["f1", "f2", "f3"]),
        ({"body.1": "store", "addmm": "recompute"}, ["f1", "f3"]),
        ({"body.*": "recompute"}, []),
        ({"body": "recompute", "body.[12]": "store"}, ["f2", "f3"]),
        ("recompute-all,relu=store", ["f1", "f3"]),
    ],
)
def test_rules_bind_and_later_ones_win(rules: object, kept: list[str]) -> None:
    assert kept_under(rules) == kept


def test_rules_bind_the_planner_under_a_budget() -> None:
    """A little below what storing all takes, one value must go: the rules say which."""
    graph = named_chain()
    everything = make_plan(graph, costs_of(graph), step_budget=None, budget="").predicted_step_peak_bytes
    budget = everything - MIB // 2
    assert len(kept_under("auto", budget)) == 2
    for name in ("f1", "f2"):
        layer = f"body.{int(name[1]) - 1}"
        assert name not in kept_under({layer: "recompute"}, budget)
        assert name in kept_under({layer: "store"}, budget)


def test_rules_that_leave_no_plan_are_refused() -> None:
    with pytest.raises(BudgetTooSmall):
        kept_under({"body.*": "store"}, 12 * MIB)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"relo": "recompute"}, "'relo' is no family.*Did you mean relu"),
        ({"boddy": "store"}, "'boddy' is no family.*Did you mean body"),
        ({"relu": "recompte"}, "says 'recompte'.*Did you mean recompute"),
        ({"": "store"}, "names nothing"),
        ({"[": "int8"}, r"the pattern '\[' has a \[ without its \]"),
        ({"layer[!]*": "store"}, r"has a \[ without its \]"),
    ],
)
def test_unknown_names_in_rules(rules: dict[str, str], words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        kept_under(rules)


def test_what_rules_come_to_is_reported() -> None:
    graph = named_chain()
    rules = {"relu": "recompute", "head.*": "store", "silu": "store"}
    options = {"step_budget": None, "budget": "", "known_ops": {"silu"}}
    plan = make_plan(graph, costs_of(graph), policy=rules, **options)  # type: ignore[arg-type]
    assert plan.solver["rules"] == [
        "relu=recompute holds for 2 values",
        "head.*=store matches nothing, or later rules win everywhere",
        "silu=store matches nothing, or later rules win everywhere",
    ]
    random = make_plan(dropout(), costs_of(dropout()), step_budget=None, budget="", policy={"bernoulli": "recompute"})
    assert random.solver["rules"] == [
        "bernoulli=recompute holds for 1 values, 1 of them cannot be made again and are stored"
    ]


def test_what_is_kept_as_a_code_is_not_kept_itself() -> None:
    graph = kept_as_code()
    plan = make_plan(graph, costs_of(graph), step_budget=None, budget="", policy={"g": "int4", "f": "int4"})
    region = graph.regions[0]
    assert [v.name for v in region.values if v.storage in plan.schedule.regions[0].kept] == ["f", "encode"]
    assert plan.lossy == {"int4": 1}
    assert plan.rerun_ops == 0, "decoding is no recomputation"
    assert plan.saved_bytes == MIB + MIB // 8
    assert plan.plain_saved_bytes == 2 * MIB
    assert plan.solver["rules"] == [
        "g=int4 holds for 1 values",
        "f=int4 holds for 1 values, 1 of them have no such code and are planned as without the rule",
    ]


def test_a_code_cannot_be_stored_as_it_was() -> None:
    graph = kept_as_code()
    plan = make_plan(graph, costs_of(graph), step_budget=None, budget="", policy={"g": "store"})
    assert plan.solver["rules"] == ["g=store holds for 1 values, 1 of them are only ever kept as a code or elsewhere"]


def test_a_rule_for_an_exact_code_binds() -> None:
    graph = coded()
    (rule, kept) = ({"f": "compress"}, ["encode"])
    plan = make_plan(graph, costs_of(graph), step_budget=None, budget="", policy=rule)
    assert [v.name for v in graph.regions[0].values if v.storage in plan.schedule.regions[0].kept] == kept
    assert plan.solver["rules"] == ["f=compress holds for 1 values"]
    assert plan.lossy == {}


def test_selective_stores_what_is_expensive() -> None:
    assert kept_under("selective") == ["f2"]
