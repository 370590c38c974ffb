"""A15. The solver returns a plan above the budget; impossible budgets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gradstow as gs
from gradstow.planner import make_plan
from twins import data


def _plan(budget: Any = None) -> gs.Plan:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())]
    return gs.plan(
        nn.Sequential(*layers).train(), data(256, 64), loss=lambda out, _: out.square().mean(), budget=budget
    )


class Several(nn.Module):
    """An op that returns several tensors, each needed later."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, order = torch.sort(torch.tanh(self.layer(x)), -1)
        return self.last(values * (1 + order.float()))


def test_every_budget_from_the_minimum_up_is_kept() -> None:
    whole = _plan()
    with pytest.raises(gs.errors.BudgetTooSmall, match="set by aten") as error:
        _plan(whole.resident_bytes + 1)
    least = error.value.minimum_bytes
    for budget in (least, (least + whole.plain_peak_bytes) // 2, whole.plain_peak_bytes, 10 * whole.plain_peak_bytes):
        plan = _plan(budget)
        assert plan.predicted_peak_bytes <= budget
        assert (plan.rerun_ops == 0) == (budget >= whole.predicted_peak_bytes)
    assert whole.minimum_peak_bound_bytes <= whole.minimum_peak_bytes <= least


@pytest.mark.parametrize("budget", [0, -1, float("nan"), 0.5, "2 GQ", "two", "0B"])
def test_budgets_that_mean_nothing(budget: Any) -> None:
    with pytest.raises(gs.errors.BudgetError):
        _plan(budget)


def test_one_place_for_three_equal_values() -> None:
    """torch's own knapsack took two of them."""
    whole = _plan()
    for share in (0.5, 0.6, 0.7, 0.8, 0.9):
        budget = int(whole.predicted_step_peak_bytes * share)
        try:
            plan = make_plan(whole.graph, whole.costs, step_budget=budget, budget="")
        except gs.errors.BudgetTooSmall:
            continue
        assert plan.predicted_step_peak_bytes <= budget


def test_ops_with_several_outputs() -> None:
    torch.manual_seed(0)
    proof = gs.verify(
        Several(), data(64, 16), loss=lambda out, _: out.square().mean(), policy="recompute-all", rounds=1
    )
    assert proof.ok


def test_unknown_options_are_errors() -> None:
    with pytest.raises(TypeError, match="memory_budget"):
        gs.stow(nn.Linear(2, 2), memory_budget=0.5)  # type: ignore[call-arg]
