"""Mutations: a Free forgotten, two events in the other order, a storage a byte too small. Every one is noticed.

By the spec where the schedule is no longer legal; else by the two replayers, of which one gets the mutated
schedule or is itself mutated. What cannot show is known beforehand by an exact rule (``mutations``), and nothing
else goes unnoticed: the rule and what is noticed are equal, case by case.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradstow.ir import (
    CostTable,
    Schedule,
    SpecError,
    StepGraph,
    _replay,
    check_graph,
    check_schedule,
    just_in_time,
    replay,
)
from gradstow.planner._evaluate import expand
from gradstow.planner._problem import build_problem
from gradstow.planner._solve import schedule_of
from graphs import HAND_MADE, chain, costs_of, multi_output, script, step, storages_of, viewed
from mutations import Account, Dropped, Fault, Shrunk, Swapped, account, expected, faults, random_schedule, shrinkings
from random_graphs import graphs_and_costs
from replayer import Ledger
from shapes import residual, skip

Judge = Callable[[Account, Account], bool]


def differ(one: Account, other: Account) -> bool:
    return one != other


def legal(graph: StepGraph, schedule: Schedule) -> bool:
    try:
        check_graph(graph)
        check_schedule(graph, schedule)
    except SpecError:
        return False
    return True


@contextmanager
def faulty(fault: Fault | Shrunk) -> Iterator[None]:
    """The replayer itself has the fault: it misreads its events, or the size of one storage."""

    class Faulty(_replay._Walk):
        def step(self, schedule: Schedule) -> None:
            super().step(schedule if isinstance(fault, Shrunk) else fault.schedule(schedule))

        def nbytes(self, key: tuple[int, int]) -> int:
            real = super().nbytes(key)
            return real - 1 if isinstance(fault, Shrunk) and key == (fault.region, fault.storage) and real else real

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_replay, "_Walk", Faulty)
        yield


@dataclass
class Trial:
    """A graph and a legal schedule; ``differ`` compares two accounts of it."""

    graph: StepGraph
    schedule: Schedule
    costs: CostTable
    plain: bool = False
    differ: Judge = differ

    def __post_init__(self) -> None:
        assert legal(self.graph, self.schedule)
        self.first, self.second = self.replayed(self.graph, self.schedule), self.counted(self.graph, self.schedule)
        assert self.first == self.second

    def replayed(self, graph: StepGraph, schedule: Schedule) -> Account:
        return account(replay(graph, schedule, self.costs, plain=self.plain))

    def counted(self, graph: StepGraph, schedule: Schedule) -> Account:
        return expected(Ledger(graph, schedule, self.costs, self.plain))

    def shows(self, fault: Fault | Shrunk) -> bool:
        return fault.shows(self.graph, self.schedule, self.plain)

    def noticed(self, fault: Fault | Shrunk) -> set[bool]:
        """In each of the ways to go wrong: whether it is noticed. A mutation that is not legal is noticed by that."""
        graph = fault.graph(self.graph) if isinstance(fault, Shrunk) else self.graph
        schedule = self.schedule if isinstance(fault, Shrunk) else fault.schedule(self.schedule)
        with faulty(fault):
            found = {self.differ(self.replayed(self.graph, self.schedule), self.second)}
        if legal(graph, schedule):
            wrong = self.replayed(graph, schedule), self.counted(graph, schedule)
            assert wrong[0] == wrong[1], "both are right about the mutated schedule"
            found |= {self.differ(wrong[0], self.second), self.differ(self.first, wrong[1])}
        return found

    def missed(self, mutations: list[Fault | Shrunk]) -> list[Fault | Shrunk]:
        """Mutations that are not noticed exactly where they show, or that the spec lets pass though they break."""
        return [m for m in mutations if self.noticed(m) != {self.shows(m)} or self.passes(m)]

    def passes(self, fault: Fault | Shrunk) -> bool:
        breaks = not isinstance(fault, Shrunk) and fault.breaks(self.graph, self.schedule)
        return breaks and legal(self.graph, fault.schedule(self.schedule))


def everything(trial: Trial) -> list[Fault | Shrunk]:
    return [*faults(trial.schedule), *shrinkings(trial.graph)]


small_graphs = graphs_and_costs(regions=3, ops=4)


@settings(max_examples=60)
@given(small_graphs, st.integers(0, 2**32), st.booleans(), st.booleans())
def test_mutations_of_random_schedules(drawn: tuple[StepGraph, CostTable], seed: int, reuse: bool, plain: bool) -> None:
    graph, costs = drawn
    trial = Trial(graph, random_schedule(graph, random.Random(seed), reuse=reuse), costs, plain)
    assert trial.missed(everything(trial)) == []


def planned(graph: StepGraph, costs: CostTable, chooser: random.Random) -> Schedule:
    """As a planner writes them: storages with several lives, given back in between and made again."""
    problem = build_problem(graph, costs)

    def some(share: float) -> set[int]:
        return {s for s in sorted(problem.keepable) if chooser.random() < share}

    without = {i: some(0.5) for i in range(len(problem.backward)) if chooser.random() < 0.5}
    return schedule_of(problem, expand(problem, some(0.5), without))


@settings(max_examples=60)
@given(small_graphs, st.integers(0, 2**32))
def test_mutations_of_planned_schedules(drawn: tuple[StepGraph, CostTable], seed: int) -> None:
    graph, costs = drawn
    trial = Trial(graph, planned(graph, costs, random.Random(seed)), costs)
    assert trial.missed(everything(trial)) == []


MAKERS = {**HAND_MADE, "residual": residual, "skip": skip}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("keep", [True, False])
def test_every_mutation_of_hand_made_graphs(name: str, keep: bool) -> None:
    graph = MAKERS[name]()
    kept = [range(len(r.storages)) if keep or not r.managed else () for r in graph.regions]
    schedule = Schedule(tuple(just_in_time(r, k) for r, k in zip(graph.regions, kept, strict=True)))
    trial = Trial(graph, schedule, costs_of(graph, working={"g": 77}))
    found = everything(trial)
    assert trial.missed(found) == []
    assert {Swapped, Shrunk} <= {type(m) for m in found if trial.shows(m)}
    assert any(isinstance(m, Swapped) and m.breaks(graph, schedule) for m in found)


def small(forward: str, backward: str, kept: list[str], graph: StepGraph) -> Trial:
    region = graph.regions[0]
    plan = just_in_time(region, ())
    plan = replace(
        plan, kept=storages_of(region, *kept), forward=script(region, forward), backward=script(region, backward)
    )
    return Trial(graph, Schedule((plan,)), costs_of(graph))


def held(graph: StepGraph) -> StepGraph:
    return step(replace(graph.regions[0], held=True))


def empty(name: str) -> StepGraph:
    graph = chain()
    storages = list(graph.regions[0].storages)
    (found,) = storages_of(graph.regions[0], name)
    storages[found] = replace(storages[found], nbytes=0)
    return step(replace(graph.regions[0], storages=tuple(storages)))


def position(trial: Trial, word: str, backward: bool) -> int:
    (event,) = script(trial.graph.regions[0], word)
    plan = trial.schedule.regions[0]
    return (plan.backward if backward else plan.forward).index(event)


CHAIN = ("f1 f2 f3 -f2", "f2 b3 -f2 -t b2 -f1 -b3.0 b1 -b2.0", ["f1"])
POOL = ("f pool -f -pool.1 g -pool.0", "bg -t f pool -f -pool.0 bpool -bg -pool.1 bf -bpool", [])


@pytest.mark.parametrize(
    ("kind", "word", "backward", "shows"),
    [
        (Dropped, "-f2", True, True),
        (Dropped, "-t", True, False),  # backward() holds the loss's gradient anyway
        (Dropped, "-f2", False, False),  # the forward ends there
        (Dropped, "-b2.0", True, False),  # and so does the backward
        (Swapped, "-f1", True, False),  # two Frees
        (Swapped, "-b3.0", True, True),  # b1 runs beside it
        (Swapped, "b1", True, True),  # b2.0 is gone when b1 reads it: the spec's, and fewer bytes
        (Swapped, "-t", True, False),
        (Swapped, "b3", True, True),
        (Swapped, "f1", False, True),
    ],
)
def test_rules_by_hand(kind: type[Dropped] | type[Swapped], word: str, backward: bool, shows: bool) -> None:
    trial = small(*CHAIN, graph=chain())
    fault = kind(0, backward, position(trial, word, backward))
    assert trial.shows(fault) == shows
    assert trial.noticed(fault) == {shows}


def test_a_gradient_is_handed_over_after_it_is_made_and_before_it_is_given_back() -> None:
    graph = step(*chain(2).regions, grads_exist=True)
    trial = small("f1 f2", "b2 ^w2 -b2.1 b1 ^w1 -b1", ["f1"], graph)
    for fault in (Dropped(0, True, 1), Swapped(0, True, 0), Swapped(0, True, 1)):
        assert fault.breaks(graph, trial.schedule)
        assert not legal(graph, fault.schedule(trial.schedule))
        assert not trial.shows(fault), "autograd adds it to what is resident"
        assert trial.noticed(fault) == {False}
    assert trial.shows(Swapped(0, True, 2)), "b1 runs beside it"
    late = small("f1 f2", "b2 b1 ^w1,w2", ["f1"], graph)
    assert not Dropped(0, True, 2).breaks(graph, late.schedule), "what is not handed over leaves at the end"
    assert legal(graph, Dropped(0, True, 2).schedule(late.schedule))


def test_a_storage_that_is_given_back_right_after_it_was_made() -> None:
    """pool.1 is made and freed at once: too early the Free finds nothing, and only what runs later shows that."""
    trial = small("f pool -pool.1 -f g -pool.0", POOL[1], POOL[2], multi_output())
    pool = Swapped(0, False, position(trial, "pool", False))
    assert trial.shows(pool)
    assert trial.noticed(pool) == {True}
    last = small("f pool g -pool.1", "bg -t f pool -f bpool -bg -pool.1 bf -bpool", [], multi_output())
    assert not last.shows(Dropped(0, False, 3))
    assert last.noticed(Dropped(0, False, 3)) == {False}


def test_empty_storages_and_what_the_caller_holds_do_not_show() -> None:
    trial = small(*CHAIN, graph=empty("f2"))
    fault = Dropped(0, True, position(trial, "-f2", True))
    assert not trial.shows(fault)
    assert trial.noticed(fault) == {False}
    assert Shrunk(0, *storages_of(trial.graph.regions[0], "f2")) not in everything(trial)
    graph = held(multi_output())  # its output's storage is given back by the backward, which reads it nowhere
    region = graph.regions[0]
    region = replace(region, outputs=(*region.outputs, next(i for i, v in enumerate(region.values) if v.name == "f")))
    trial = small("f pool -pool.1 g -pool.0", "bg -t pool -pool.0 -f bpool -bg -pool.1 bf -bpool", ["f"], step(region))
    fault = Dropped(0, True, position(trial, "-f", True))
    assert not trial.shows(fault)
    assert trial.noticed(fault) == {False}


def test_sizes_that_nobody_counts() -> None:
    graph = viewed()
    trial = Trial(graph, Schedule((just_in_time(graph.regions[0], ()),)), costs_of(graph))
    weight, activation = storages_of(graph.regions[0], "w", "f")
    assert (trial.shows(Shrunk(0, weight)), trial.shows(Shrunk(0, activation))) == (False, True)
    assert (trial.noticed(Shrunk(0, weight)), trial.noticed(Shrunk(0, activation))) == ({False}, {True})


# ----------------------------------------------------------------------------- the checks themselves can fail


def unnoticed(compare: Judge, *, seeds: int = 20) -> list[type]:
    """Kinds of the mutations that a comparison misses, on a few random graphs."""
    missed: list[Fault | Shrunk] = []
    for seed in range(seeds):
        chooser = random.Random(seed)
        graph = residual(2, size=100) if seed % 2 else skip(size=100)
        trial = Trial(graph, random_schedule(graph, chooser, reuse=True), costs_of(graph), differ=compare)
        missed += trial.missed(chooser.sample(everything(trial), 12))
    return [type(m) for m in missed]


def test_a_comparison_that_sees_less_misses_some() -> None:
    assert unnoticed(differ) == []
    assert {Dropped, Swapped, Shrunk} <= set(unnoticed(lambda a, b: a[4] != b[4])), "peaks alone"
    assert Dropped in unnoticed(lambda a, b: a[3] != b[3]), "what is left at the end"
    assert Swapped in unnoticed(lambda a, b: a[1:] != b[1:]), "bytes without the names of the ops"
    assert len(unnoticed(lambda a, b: False)) > len(unnoticed(lambda a, b: a[4] != b[4]))


def test_a_rule_that_calls_everything_visible_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Dropped, Swapped, Shrunk):
        with monkeypatch.context() as patch:
            patch.setattr(kind, "shows", lambda *_: True)
            assert set(unnoticed(differ)) == {kind}


def test_a_spec_that_lets_everything_pass_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = small(*CHAIN, graph=chain())
    found = everything(trial)
    assert not any(trial.passes(m) for m in found)
    monkeypatch.setitem(globals(), "legal", lambda *_: True)
    # f2 f1, f3 f2, -f2 f3; b3 f2, -f2 b3, -f1 b2, -b2.0 b1
    assert sum(trial.passes(m) for m in found) == 7


def test_the_same_fault_in_both_goes_unnoticed() -> None:
    """Nothing is noticed without a second, right account: that is why the ledger shares no code."""
    trial = small(*CHAIN, graph=chain())
    fault = Dropped(0, True, position(trial, "-f2", True))
    both = fault.schedule(trial.schedule)
    assert trial.replayed(trial.graph, both) == trial.counted(trial.graph, both)
    assert trial.replayed(trial.graph, both) != trial.second
