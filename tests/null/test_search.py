"""The search: which moments it adds, what an interrupt leaves, what stands in where it finds nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gradstow.errors import BudgetTooSmall, PolicyError
from gradstow.planner import Effort, _minimum, _search, _small, _solve, make_plan
from gradstow.planner._evaluate import Outcome, evaluate, expand
from gradstow.planner._minimum import minimum
from gradstow.planner._problem import Problem, build_problem
from gradstow.planner._program import Solution, Stages
from gradstow.planner._search import Found, search
from graphs import MIB, Sketch, costs_of, step
from shapes import tower


def problem_of(length: int = 8, **fields: Any) -> Problem:
    graph = step(*tower(length).regions, **fields)
    return build_problem(graph, costs_of(graph))


# ------------------------------------------------------------------------------------------------- moments


def outcome(problem: Problem, during: list[int]) -> Outcome:
    """As if the tower, all kept, had these bytes at its moments."""
    real = evaluate(problem, expand(problem, set(problem.keepable)))
    assert len(real.during) == len(during)
    return Outcome(real.order, max(during), 0.0, real.kept, during, real.lives)


def test_moments_over_the_budget_are_added_the_worst_first_and_apart() -> None:
    problem = problem_of()
    during = [0] * 16
    during[15], during[13], during[10], during[4] = 9, 8, 7, 6
    # backward ops 7, 5 (too close to 7) and 2, forward op 4
    assert _search._overflows(problem, outcome(problem, during), 5) == {7, 2, -5}
    assert _search._overflows(problem, outcome(problem, during), 6) == {7, 2}
    assert _search._overflows(problem, outcome(problem, during), 9) == set()


def test_at_most_four_moments_are_added_at_once() -> None:
    problem = problem_of(20)
    assert _search._overflows(problem, outcome(problem, list(range(1, 41))), 0) == {19, 15, 11, 7}


def test_the_room_for_the_loss_is_no_moment_of_the_program() -> None:
    problem = problem_of(reserve_bytes=5)
    during = [0] * 17
    during[8] = 9
    assert _search._overflows(problem, outcome(problem, during), 0) == set()


def test_a_backward_op_is_one_moment_whatever_runs_again_for_it() -> None:
    problem = problem_of()
    order = expand(problem, set())
    assert [again for _, again in order] == [True] * 7 + [False] * 8
    found = Outcome(order, 9, 0.0, set(), [0] * 8 + [9] * 7 + [0] * 8, [])
    assert _search._overflows(problem, found, 5) == {0}


# ------------------------------------------------------------------------------------------------- efforts


@pytest.mark.parametrize(("name", "rounds"), [("quick", 0), ("normal", 6), ("thorough", 12)])
def test_efforts_by_name(name: str, rounds: int) -> None:
    assert Effort.of(name).rounds == rounds


def test_an_effort_of_ones_own_and_an_unknown_one() -> None:
    mine = Effort(rounds=2)
    assert Effort.of(mine) is mine
    with pytest.raises(PolicyError, match=r"^there is no effort 'lots'\. Choose quick, normal, thorough\.$"):
        Effort.of("lots")


def test_the_quick_effort_never_solves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stages, "solve", interrupted)
    graph = tower(20)
    plan = make_plan(graph, costs_of(graph), step_budget=12 * MIB, budget="", effort="quick")
    assert plan.solver["solver"] == "greedy"
    assert plan.predicted_step_peak_bytes <= 12 * MIB
    assert plan.lower_bound_seconds == plan.plain_seconds, "nothing is proven"


# ---------------------------------------------------------------------------------------------- interrupts


def interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def test_an_interrupt_gives_the_best_so_far_where_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stages, "solve", interrupted)
    graph = tower(20)
    options: dict[str, Any] = {"step_budget": 12 * MIB, "budget": ""}
    plan = make_plan(graph, costs_of(graph), **options, effort=Effort(interruptible=True))
    assert plan.solver == {"solver": "stages", "rounds": 1, "moments": 0, "interrupted": True}
    assert plan.predicted_step_peak_bytes <= 12 * MIB
    with pytest.raises(KeyboardInterrupt):
        make_plan(graph, costs_of(graph), **options)


def test_a_plan_that_an_interrupt_had_a_part_in_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the replay has it decided again, and where all orders are tried."""
    graph, real, solves = tower(20), Stages.solve, []

    def once(*args: Any, **kwargs: Any) -> Any:
        solves.append(1)
        return interrupted() if len(solves) == 1 else real(*args, **kwargs)

    peaks = iter([12 * MIB + 1])
    monkeypatch.setattr(_solve, "_replayed_peak", lambda *_: next(peaks, 0))
    monkeypatch.setattr(Stages, "solve", once)
    options: dict[str, Any] = {"step_budget": 12 * MIB, "budget": "", "effort": Effort(interruptible=True)}
    plan = make_plan(graph, costs_of(graph), **options)
    assert len(solves) > 1
    assert plan.solver["interrupted"]
    monkeypatch.undo()
    monkeypatch.setattr(Stages, "solve", interrupted)
    monkeypatch.setattr(_small, "best", cheapest)
    plan = make_plan(graph, costs_of(graph), **options)
    assert plan.solver == {"solver": "all orders", "interrupted": True}


def cheapest(problem: Problem, budget: int) -> Outcome:
    """One that fits, as if it took no time."""
    fitting = _search.settle(problem, _search.greedy(problem, budget), budget, Effort())
    return replace(fitting, seconds=-1.0)


def test_an_interrupt_before_there_is_an_order_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_search, "greedy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_plan(tower(), costs_of(tower()), step_budget=5 * MIB, budget="", effort=Effort(interruptible=True))


# ------------------------------------------------------------------------------------------------ stand-ins


def test_a_solution_that_does_not_fit_when_followed_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that says to keep everything is believed no further than it fits."""
    problem = problem_of()
    everything = Solution(set(problem.keepable), {}, 0.0)
    monkeypatch.setattr(Stages, "solve", lambda *_, **__: everything)
    found = search(problem, Stages(problem), 6 * MIB, Effort())
    assert found.outcome is not None
    assert found.outcome.peak_bytes <= 6 * MIB
    assert found.moments, "the moments at which it exceeds"


def test_a_search_that_adds_no_moment_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything fits, but the bound is far off: another round would be the same."""
    problem = problem_of()
    nothing = Solution(set(), {}, 0.0)
    monkeypatch.setattr(Stages, "solve", lambda *_, **__: nothing)
    monkeypatch.setattr(_search, "improve", lambda _problem, outcome, *_, **__: outcome)
    monkeypatch.setattr(_search, "greedy", lambda problem, _: evaluate(problem, expand(problem, set())))
    found = search(problem, Stages(problem), 20 * MIB, Effort())
    assert (found.rounds, found.moments) == (1, set())
    assert found.outcome is not None
    assert found.outcome.seconds == 7.0


def test_the_smallest_peak_serves_where_neither_search_finds_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_solve, "search", lambda *_, **__: Found(None))
    monkeypatch.setattr(_small, "best", lambda *_: None)
    graph = tower()
    plan = make_plan(graph, costs_of(graph), step_budget=5 * MIB, budget="")
    assert plan.solver == {"solver": "smallest peak"}
    assert plan.predicted_step_peak_bytes <= 5 * MIB
    with pytest.raises(BudgetTooSmall) as caught:
        make_plan(graph, costs_of(graph), step_budget=4 * MIB - 1, budget="")
    assert caught.value.minimum_bytes == 4 * MIB


def test_trying_everything_serves_where_the_search_finds_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_solve, "search", lambda *_, **__: Found(None))
    graph = tower(4)
    plan = make_plan(graph, costs_of(graph, {"f1": 3.0}), step_budget=4 * MIB, budget="")
    assert plan.solver == {"solver": "all orders"}
    assert plan.timeline.recompute_seconds == 3.0


def test_the_smallest_peak_is_bisected_where_too_much_cannot_be_tried() -> None:
    problem = problem_of(20)
    assert not list(_small.outcomes(problem))
    found = minimum(problem, Stages(problem), Effort())
    assert found.proven_bytes <= found.outcome.peak_bytes == 4 * MIB


def test_the_bisection_finds_what_the_moves_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(12)
    everything = evaluate(problem, expand(problem, set(problem.keepable)))
    monkeypatch.setattr(_minimum, "_lowest", lambda *_: everything)
    found = minimum(problem, Stages(problem), Effort())
    assert found.outcome.peak_bytes == 4 * MIB
    assert 4 * MIB - 4 * MIB // 50 <= found.proven_bytes <= 4 * MIB


def test_an_op_that_touches_only_what_is_resident_is_named_alone() -> None:
    s = Sketch()
    x, w, running = s.resident(), s.resident(), s.resident(64, "running")
    s.op("track", (x, running), (), pinned="changes a buffer", writes=(s.values[running].storage,))
    (f,) = s.op("f", (x, w), (MIB,))
    (b,) = s.op("b", (s.tangent(), x), (MIB,), backward=True)
    graph = step(s.done((f,), {w: b}))
    with pytest.raises(BudgetTooSmall, match=r"10\.0 MiB, set by track \(no source line\); under"):
        make_plan(graph, costs_of(graph, working={"track": 10 * MIB}), step_budget=MIB, budget="")
