"""Proven bounds are bounds: on small graphs no order is faster, or fits where the program says that none does."""

from __future__ import annotations

import random

from gradstow.planner import Effort, _small
from gradstow.planner._minimum import minimum
from gradstow.planner._problem import build_problem
from gradstow.planner._program import Stages
from gradstow.planner._search import search
from graphs import MIB
from random_graphs import random_costs, random_graph


def test_no_order_beats_the_bound() -> None:
    checked = tight = proven = 0
    for seed in range(400):
        pick = random.Random(seed).randint
        graph = random_graph(pick, regions=1 if seed % 2 else 3, ops=5, unit=MIB)
        problem = build_problem(graph, random_costs(pick, graph, unit=MIB))
        outcomes = list(_small.outcomes(problem))
        if not outcomes or not problem.forward:
            continue
        stages = Stages(problem)
        for budget in sorted({o.peak_bytes for o in outcomes})[:5]:
            best = min(o.seconds for o in outcomes if o.peak_bytes <= budget)
            found = search(problem, stages, budget, Effort())
            assert found.bound <= best + 1e-9
            assert not found.infeasible
            if found.outcome is not None:
                assert found.outcome.peak_bytes <= budget
                assert found.outcome.seconds >= found.bound - 1e-9
                tight += found.outcome.seconds <= best + 1e-9
            checked += 1
        lowest = min(o.peak_bytes for o in outcomes)
        least = minimum(problem, stages, Effort())
        assert least.proven_bytes <= least.outcome.peak_bytes <= lowest
        proven += search(problem, stages, least.proven_bytes - 1, Effort()).outcome is None
    assert checked >= 400
    assert tight >= 0.9 * checked, "the search alone, without trying everything, is nearly always as good"
    assert proven >= 100, "nothing is found under what is proven"


def test_a_bound_that_is_too_high_is_seen() -> None:
    """The comparison above fails for a program that counts more than is alive."""
    wrong = 0
    for seed in range(60):
        pick = random.Random(seed).randint
        graph = random_graph(pick, ops=5, unit=MIB)
        problem = build_problem(graph, random_costs(pick, graph, unit=MIB))
        outcomes = list(_small.outcomes(problem))
        if not outcomes or not problem.backward:
            continue
        stages = Stages(problem)
        stages.fixed_bytes = [nbytes + 4 * MIB for nbytes in stages.fixed_bytes]
        for budget in sorted({o.peak_bytes for o in outcomes})[:5]:
            best = min(o.seconds for o in outcomes if o.peak_bytes <= budget)
            everywhere = stages.solve(budget, set(range(len(problem.backward))), gap=0.0, seconds=10)
            wrong += everywhere.infeasible or everywhere.bound > best + 1e-9
    assert wrong >= 10
