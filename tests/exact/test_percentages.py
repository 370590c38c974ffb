"""A percentage is of plain PyTorch's peak for each kind of batch, and never less than an earlier batch was given."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradstow as gs
from gradstow._stow import plan_of
from gradstow.cost import measure_peak
from twins import data


def net() -> nn.Module:
    torch.manual_seed(0)
    blocks = [m for _ in range(4) for m in (nn.Linear(128, 128), nn.GELU(), nn.LayerNorm(128))]
    return nn.Sequential(*blocks, nn.Linear(128, 10)).train()


def peak(model: nn.Module, rows: int) -> int:
    x = data(rows, 128)
    with measure_peak("cpu") as memory:
        model(x).square().mean().backward()
    model.zero_grad()
    return memory.peak_bytes


def test_a_short_last_batch_may_take_what_the_full_ones_were_given() -> None:
    with pytest.raises(gs.errors.BudgetTooSmall):
        peak(gs.stow(net(), "50%"), 16)
    model = gs.stow(net(), "50%")
    full, given = peak(model, 1024), plan_of(model)
    short, plan = peak(model, 16), plan_of(model)
    assert given is not None
    assert plan is not None
    assert plan is not given
    assert given.step_budget_bytes is not None
    assert full <= given.step_budget_bytes
    assert plan.step_budget_bytes == given.step_budget_bytes
    assert short < full
