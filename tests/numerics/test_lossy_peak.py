"""The peak of a plan with lossy codes holds, the codes' own working memory included."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

import gradstow as gs
from gradstow import _planning
from gradstow._stow import plan_of
from gradstow.cost import measure_peak
from gradstow.ir import CostTable
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


@pytest.fixture
def fast_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes cost a tenth of any other op here, whatever the machine is like; working memory is as measured."""
    measured = _planning.measured_costs

    def fast(*args: Any, **kwargs: Any) -> CostTable:
        table = measured(*args, **kwargs)
        costs = {t: replace(c, seconds=1e-3 if "code_lossy" in t else 1e-2) for t, c in table.costs.items()}
        return replace(table, costs=costs)

    monkeypatch.setattr(_planning, "measured_costs", fast)


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


@pytest.mark.usefixtures("fast_codes")
def test_a_budget_takes_codes_where_they_are_faster_or_alone_fit() -> None:
    plain = net()
    exact = gs.plan(plain, X, budget="30%", actions=("store", "recompute"))
    budget = exact.predicted_peak_bytes
    lossy = gs.plan(plain, X, budget=budget, lossy="int4")
    assert lossy.predicted_seconds < exact.predicted_seconds
    model = gs.stow(copy.deepcopy(plain), budget, lossy="int4")
    assert peak(model) + exact.resident_bytes <= budget


@pytest.mark.usefixtures("fast_codes")
def test_a_frontier_with_codes() -> None:
    exact, lossy = gs.frontier(net(), X, points=5), gs.frontier(net(), X, points=5, lossy="int4")
    assert lossy.rows[-1].peak_bytes <= exact.rows[-1].peak_bytes
    assert [r.seconds for r in lossy.rows] == sorted(r.seconds for r in lossy.rows)
    for row in exact.rows:  # with more allowed, nothing takes more memory and time
        assert any(r.peak_bytes <= row.peak_bytes and r.seconds <= row.seconds for r in lossy.rows)


def test_a_frontier_takes_codes_where_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = _planning.measured_costs

    def fast(*args: Any, **kwargs: Any) -> CostTable:
        table = measured(*args, **kwargs)
        codes = ("code_lossy", "_bits")
        costs = {t: replace(c, seconds=1e-3 if any(n in t for n in codes) else 1e-2) for t, c in table.costs.items()}
        return replace(table, costs=costs)

    monkeypatch.setattr(_planning, "measured_costs", fast)
    lossy = gs.frontier(net(), X, points=5, lossy="int4")
    assert any(plan.lossy for plan in lossy.plans)


@pytest.mark.usefixtures("fast_codes")
def test_a_code_may_be_allowed_beside_rules() -> None:
    """The rules hold, and what they do not name may be kept as the code."""
    plain = net()
    least = gs.plan(plain, X, budget="100%", policy={"body.0.*": "bf16"}).minimum_peak_bytes
    plan = gs.plan(plain, X, budget=int(1.2 * least), policy={"body.0.*": "bf16"}, lossy="int4")
    assert set(plan.lossy) == {"bf16", "int4"}
    rows = [row for row in plan.rows if "body.0" in row.module and row.decision == "compress"]
    assert rows
    assert not any("int4" in row.reason for row in rows)
    model = gs.stow(copy.deepcopy(plain), plan=plan)
    assert peak(model) <= plan.predicted_step_peak_bytes


def test_verify_says_how_far_gradients_are() -> None:
    close, far = (gs.verify(net(), X, policy=f"*={code}", rounds=1, steps=1) for code in ("int8", "int2"))
    assert close.gradient_error is not None
    assert far.gradient_error is not None
    assert 0 < close.gradient_error < 0.02 < far.gradient_error
    assert "of their norm" in str(far)
    assert far.to_json()["gradient_error"] == far.gradient_error
    assert gs.verify(net(), X, budget="90%", rounds=1, steps=1).gradient_error is None


class Noisy(torch.nn.Module):
    """Each layer's backward reads noise that must not be drawn again: exactly, all of it is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.body:
            y = layer(x)
            x = y * torch.randn_like(y)
        return x.square().mean()


def test_codes_that_take_longer_are_used_where_nothing_else_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(gs.errors.BudgetTooSmall) as bare:
        gs.plan(Noisy(), X, budget="1%")
    budget = bare.value.minimum_bytes * 3 // 4
    monkeypatch.setattr(_planning, "worthwhile", lambda *_: iter(()))
    plan = gs.plan(Noisy(), X, budget=budget, lossy="int2")
    assert plan.predicted_peak_bytes <= budget
    assert plan.lossy
    with pytest.raises(gs.errors.BudgetTooSmall) as refusal:
        gs.plan(Noisy(), X, budget="1%", lossy="int2")
    assert refusal.value.minimum_bytes <= budget
