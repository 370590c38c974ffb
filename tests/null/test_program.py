"""The integer program on towers: what it keeps, what it proves, and where it says that nothing fits."""

from __future__ import annotations

import pytest

from gradstow.ir import StepGraph
from gradstow.planner import make_plan
from gradstow.planner._problem import Problem, build_problem
from gradstow.planner._program import Solution, Stages
from graphs import MIB, Sketch, costs_of, step, storages_of, with_op
from shapes import tower

SECONDS = {f"f{i + 1}": float(i + 1) for i in range(8)}


def problem_of(graph: StepGraph) -> Problem:
    return build_problem(graph, costs_of(graph, SECONDS))


def solved(problem: Problem, mib: float, *moments: int) -> Solution:
    return Stages(problem).solve(int(mib * MIB), set(moments), gap=0.0, seconds=60)


def names(problem: Problem, storages: set[int]) -> str:
    region = problem.graph.regions[0]
    return " ".join(v.name for i, v in enumerate(region.values) if problem.numbers.get((0, v.storage)) in storages)


def test_without_moments_only_the_start_of_the_backward_counts() -> None:
    problem = problem_of(tower())
    found = solved(problem, 6)
    assert found.kept is not None
    assert names(problem, found.kept) == "f2 f3 f4 f5 f6 f7", "seven of 1 MiB, of which the first takes 1 s"
    assert (found.bound, found.without, found.infeasible) == (pytest.approx(1.0), {}, False)


def test_a_moment_counts_what_its_op_needs_beside() -> None:
    """The first backward op runs beside a tangent and what it makes: 4 of 6 MiB are left."""
    problem = problem_of(tower())
    found = solved(problem, 6, 0)
    assert found.kept is not None
    assert names(problem, found.kept) == "f4 f5 f6 f7"
    assert found.bound == pytest.approx(6.0)
    assert names(problem, found.without[0]) == "f1 f2 f3 f8", "f8 is the output, which nobody reads again"


def test_what_an_op_reads_is_alive_while_it_runs() -> None:
    """At b8: the tangent, f7 and what it makes. Less than that, and no schedule can be."""
    problem = problem_of(tower())
    assert not solved(problem, 3, 0).infeasible
    found = solved(problem, 3 - 1 / 1024, 0)
    assert (found.kept, found.infeasible) == (None, True)


def test_a_value_that_is_dropped_in_between_is_made_again() -> None:
    """Beside two gradients and the tangent one value is alive at each op: f1 to f5 run for b6, and so on down."""
    problem = problem_of(tower())
    found = solved(problem, 4, *range(8))
    assert found.bound == pytest.approx(15 + 10 + 6 + 3 + 1)
    assert found.kept is not None
    assert names(problem, found.kept) == "f6 f7"
    assert solved(problem, 4 - 1 / 1024, *range(8)).infeasible


def test_moments_of_the_forward() -> None:
    """Forward op 7 makes f8 beside f7, which it reads, and what was kept before."""
    problem = problem_of(tower())
    kept = {mib: solved(problem, mib, -8).bound for mib in (8, 7, 6, 3)}
    # f8, f7 and the kept ones of f1 to f6, all but the first, the first two, and five of them
    assert kept == {8: pytest.approx(0.0), 7: pytest.approx(1.0), 6: pytest.approx(3.0), 3: pytest.approx(15.0)}
    assert solved(problem, 2 - 1 / 1024, -8).infeasible


def test_writing_over_a_dying_input_counts_once() -> None:
    graph = tower()
    region = graph.regions[0]
    f7 = next(i for i, v in enumerate(region.values) if v.name == "f7")
    over = problem_of(with_op(graph, 0, "f8", overwrites=(f7,)))
    assert solved(over, 6, -8).bound == pytest.approx(1.0)


def test_what_the_rules_forbid_is_not_kept() -> None:
    graph = tower(20)
    plan = make_plan(
        graph, costs_of(graph), step_budget=12 * MIB, budget="", policy={"f19": "recompute"}, effort="normal"
    )
    region, schedule = graph.regions[0], plan.schedule.regions[0]
    assert storages_of(region, "f19")[0] not in schedule.kept
    assert plan.solver["solver"] == "stages"
    assert plan.predicted_step_peak_bytes <= 12 * MIB
    problem = problem_of(tower())
    problem.never.add(next(n for n in problem.keepable if names(problem, {n}) == "f7"))
    found = solved(problem, 20)
    assert found.kept is not None
    assert names(problem, found.kept) == "f1 f2 f3 f4 f5 f6"
    assert found.bound == pytest.approx(7.0)


def test_crumbs_are_alive_and_weigh_nothing() -> None:
    """So that the program stays a relaxation with fewer variables."""
    s = Sketch()
    x, w = s.resident(), s.resident()
    (crumb,) = s.op("crumb", (x,), (1024,))
    (f,) = s.op("f", (crumb, x), (MIB,))
    (g,) = s.op("g", (f,), (MIB,))
    (b,) = s.op("b", (s.tangent(), f, crumb), (MIB,), backward=True)
    problem = problem_of(step(s.done((g,), {w: b})))
    found = solved(problem, 3, 0)
    assert found.kept is not None
    assert names(problem, found.kept) == "crumb f"
    assert not found.infeasible
    assert solved(problem, 3 - 1 / 1024, 0).infeasible


@pytest.mark.parametrize(("mib", "fits"), [(2, True), (2 - 1 / 1024, False)])
def test_a_backward_that_needs_nothing_of_the_forward(mib: float, fits: bool) -> None:
    s = Sketch()
    x, w = s.resident(), s.resident()
    (f,) = s.op("f", (x, w), (MIB,))
    (b,) = s.op("b", (s.tangent(), x), (MIB,), backward=True)
    problem = problem_of(step(s.done((f,), {w: b})))
    found = solved(problem, mib, 0)
    assert (found.kept, found.bound, found.infeasible) == (set() if fits else None, 0.0, not fits)


def test_several_outputs_run_again_at_the_price_of_one() -> None:
    s = Sketch()
    x, w = s.resident(), s.resident()
    one, two = s.op("f5", (x,), (MIB, MIB))
    (g,) = s.op("g", (one, two), (MIB,))
    t = s.tangent()
    (b1,) = s.op("b1", (t,), (4 * MIB,), backward=True)
    (b2,) = s.op("b2", (b1, one, two), (MIB,), backward=True)
    problem = problem_of(step(s.done((g,), {w: b2})))
    found = solved(problem, 5, 0)  # beside t and what b1 makes nothing is left
    assert found.bound == pytest.approx(5.0)
    assert names(problem, found.without[0]) == "f5.0 f5.1 g"
