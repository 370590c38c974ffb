"""The peak of a plan with lossy codes holds, the codes' own working memory included."""

from __future__ import annotations

import copy

import torch

import gradstow as gs
from gradstow._stow import plan_of
from gradstow.cost import measure_peak
from twins import data


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    blocks = (torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Dropout(0.1)) for _ in range(6))
    return torch.nn.Sequential(*blocks).train()


def peak(model: torch.nn.Module) -> int:
    x = data(8192, 256)
    for _ in range(2):
        model.zero_grad()
        with measure_peak("cpu") as memory:
            model(x).square().mean().backward()
    return memory.peak_bytes


def test_rules() -> None:
    plain = net()
    stowed = gs.stow(copy.deepcopy(plain), policy="*=int4")
    peaks = peak(plain), peak(stowed)
    plan = plan_of(stowed)
    assert plan is not None
    assert peaks[1] <= plan.predicted_step_peak_bytes
    assert peaks[1] < 0.5 * peaks[0]
    decisions = {row.op: (row.decision, row.reason) for row in plan.rows if row.decision != "free"}
    assert decisions["gelu"][0] == "compress"
    assert "int4, error at most 1/15 of the range of 128 neighbours" in decisions["gelu"][1]


def test_a_budget_that_only_lossy_codes_can_meet() -> None:
    plain = net()
    x = data(8192, 256)
    exact = gs.plan(plain, x, loss=lambda out, _: out.square().mean(), budget="30%", actions=("store", "recompute"))
    budget = exact.predicted_peak_bytes
    lossy = gs.plan(plain, x, loss=lambda out, _: out.square().mean(), budget=budget, lossy="int4")
    assert lossy.predicted_seconds <= exact.predicted_seconds
    model = gs.stow(copy.deepcopy(plain), budget, lossy="int4")
    measured = peak(model) + sum(p.numel() * 4 for p in plain.parameters()) + x.numel() * 4
    assert measured <= budget
