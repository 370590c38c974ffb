"""The peak of a plan with lossy codes holds, the codes' own working memory included."""

from __future__ import annotations

import copy

import torch

import gradstow as gs
from gradstow._stow import plan_of
from gradstow.cost import measure_peak
from twins import data


class Net(torch.nn.Module):
    """Returns its loss, so that all of the step is planned."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (
            torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Dropout(0.1)) for _ in range(6)
        )
        self.body = torch.nn.Sequential(*blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return Net().train()


X = data(8192, 256)


def peak(model: torch.nn.Module) -> int:
    """Of the second step."""
    for _ in range(2):
        model.zero_grad()
        with measure_peak("cpu") as memory:
            model(X).backward()
    return memory.peak_bytes


def test_rules() -> None:
    plain = net()
    stowed = gs.stow(copy.deepcopy(plain), policy="*=int4")
    peaks = peak(plain), peak(stowed)
    plan = plan_of(stowed)
    assert plan is not None
    assert peaks[1] <= plan.predicted_step_peak_bytes
    assert peaks[1] < 0.45 * peaks[0]
    assert plan.saved_bytes < plan.plain_saved_bytes / 6
    rows = [row for row in plan.rows if row.op == "gelu"]
    assert {row.decision for row in rows} <= {"compress", "free"}
    coded = next(row for row in plan.rows if row.op == "addmm" and row.decision == "compress")
    assert "int4, error at most 1/15 of the range of 128 neighbours" in coded.reason


def test_a_budget_takes_codes_where_they_are_faster_or_alone_fit() -> None:
    plain = net()
    exact = gs.plan(plain, X, budget="30%", actions=("store", "recompute"))
    budget = exact.predicted_peak_bytes
    lossy = gs.plan(plain, X, budget=budget, lossy="int4")
    assert lossy.predicted_seconds <= exact.predicted_seconds
    model = gs.stow(copy.deepcopy(plain), budget, lossy="int4")
    assert peak(model) + exact.resident_bytes <= budget
