"""Moves on small orders: what they insert and take out, and where they stop."""

from __future__ import annotations

import pytest

from gradstow.planner._evaluate import Order, Outcome, evaluate, expand
from gradstow.planner._moves import _Lives, improve, prune, repair
from gradstow.planner._problem import Problem, build_problem
from graphs import MIB, Sketch, costs_of, step
from shapes import tower

SECONDS = {f"f{i + 1}": float(i + 1) for i in range(8)}


def problem_of(length: int = 8) -> Problem:
    graph = tower(length)
    return build_problem(graph, costs_of(graph, SECONDS))


def storage(problem: Problem, name: str) -> int:
    region = problem.graph.regions[0]
    return problem.numbers[0, next(v.storage for v in region.values if v.name == name)]


def words(problem: Problem, order: Order) -> str:
    ops = problem.graph.regions[0].ops
    return " ".join(ops[node.op].name for node, _ in order)


def keeping(problem: Problem, *names: str) -> Outcome:
    return evaluate(problem, expand(problem, {storage(problem, name) for name in names}))


ALL = "f1 f2 f3 f4 f5 f6 f7 b8 b7 b6 b5 b4 b3 b2 b1"


@pytest.mark.parametrize(
    ("work", "order", "seconds"),
    [
        (0, ALL, 28),
        (1, "f1 f2 f3 f4 f5 f6 b8 b7 b6 b5 b4 b3 b2 b1", 21),
        (2, "f1 f2 f3 f4 f5 b8 b7 b6 b5 b4 b3 b2 b1", 15),
        (100, "b8 b7 b6 b5 b4 b3 b2 b1", 0),
    ],
)
def test_improving_takes_out_the_slowest_first(work: int, order: str, seconds: float) -> None:
    problem = problem_of()
    start = keeping(problem)
    assert words(problem, start.order) == ALL
    found = improve(problem, start, 20 * MIB, work=work)
    assert (words(problem, found.order), found.seconds) == (order, seconds)


def test_improving_stays_within_the_budget_and_the_work() -> None:
    """Where no rerun may go, each is tried once, and the order stays."""
    problem = problem_of()
    start = keeping(problem, "f5", "f6", "f7")
    assert (start.peak_bytes, start.seconds) == (7 * MIB, 10)
    for work in (1, 2, 100):
        assert improve(problem, start, 4 * MIB, work=work) is start


def test_a_repair_makes_again_what_frees_most_per_second() -> None:
    problem = problem_of()
    start = keeping(problem, *(f"f{i}" for i in range(1, 8)))
    assert start.peak_bytes == 9 * MIB
    found = repair(problem, start, 8 * MIB, work=100)
    assert words(problem, found.order) == "b8 b7 b6 b5 b4 b3 f1 b2 b1"
    assert (found.peak_bytes, found.seconds) == (8 * MIB, 1)
    assert repair(problem, start, 8 * MIB, work=0) is start
    assert repair(problem, start, 9 * MIB, work=100) is start


def late(length: int) -> Problem:
    """A tower whose first backward op needs 100 MiB and reads none of it: its last value waits meanwhile."""
    s = Sketch()
    x = s.resident(MIB, "x")
    acts = [x]
    for i in range(length):
        acts += s.op(f"f{i + 1}", (acts[-1],), (MIB,))
    (out,) = s.op("out", (acts[-1],), (MIB,))
    t = s.tangent(MIB, "t")
    (z,) = s.op("z", (t,), (MIB,), backward=True)
    (b,) = s.op("b", (z, acts[-1]), (MIB,), backward=True)
    graph = step(s.done((out,), {x: b}))
    return build_problem(graph, costs_of(graph, working={"z": 100 * MIB}))


def test_a_repair_inserts_a_whole_chain() -> None:
    problem = late(3)
    start = keeping(problem, "f3")
    assert words(problem, start.order) == "z b"
    found = repair(problem, start, 102 * MIB, work=10)
    assert words(problem, found.order) == "z f1 f2 f3 b"
    assert (found.peak_bytes, found.seconds) == (102 * MIB, 3)


def test_a_chain_that_is_too_long_is_left() -> None:
    short, long = late(60), late(61)
    for problem, nodes in ((short, 60), (long, 0)):
        last = f"f{len(problem.forward) - 1}"
        start = keeping(problem, last)
        assert len(_Lives(problem, start).chain(storage(problem, last), 1)) == nodes
        found = repair(problem, start, 102 * MIB, work=10)
        assert found.seconds == nodes
        assert (found is start) == (not nodes)


def test_a_chain_begins_at_what_is_there() -> None:
    problem = problem_of()
    lives = _Lives(problem, keeping(problem, "f3", "f5", "f6", "f7"))
    # in "b8 b7 b6 f4 b5 b4 f1 f2 b3 b2 b1" f3 is there until b4, position 5
    assert [words(problem, [(n, True) for n in lives.chain(storage(problem, "f4"), p)]) for p in (1, 5, 6)] == [
        "f4", "f4", "f1 f2 f3 f4",
    ]  # fmt: skip


def test_pruning_takes_out_what_nobody_reads() -> None:
    problem = problem_of()
    order = keeping(problem, "f1", "f2", "f3", "f4", "f5", "f6", "f7").order
    node = {problem.graph.regions[0].ops[n.op].name: n for n in problem.forward}
    spoiled = [(node["f1"], True), (node["f2"], True), *order, (node["f7"], True)]
    assert words(problem, prune(problem, spoiled)) == "f1 f2 b8 b7 b6 b5 b4 b3 b2 b1", "read by b3 and b2 all the same"
    assert words(problem, prune(problem, [*order, (node["f7"], True)])) == "b8 b7 b6 b5 b4 b3 b2 b1"
