"""A13. A mixture of experts' router flips on recompute: integer decisions are stored, never made again."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradstow as gs
from gradstow._stow import plan_of
from twins import POLICIES, assert_equal_twins, data, steps


class Masked(nn.Module):
    """Top-1 of four experts by masks; many rows have exactly equal scores, and expert 3 gets nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        with torch.no_grad():
            self.router.weight[1] = self.router.weight[0]
            self.router.bias.copy_(torch.tensor([0.0, 0.0, 0.0, -100.0]))
            self.router.bias[1] = self.router.bias[0]

    def chosen(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.softmax(self.router(x), -1).topk(1, -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.chosen(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out = out + torch.where(chosen == number, torch.tanh(expert(x)), 0.0)
        return out * weight


class Gathered(Masked):
    """The same by boolean indexing, whose shapes depend on the data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.chosen(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen[:, 0] == number).nonzero().squeeze(1)
            out = out.index_add(0, rows, torch.tanh(expert(x[rows])))
        return out * weight


@pytest.mark.parametrize("policy", POLICIES)
def test_masks(policy: str) -> None:
    model = assert_equal_twins(Masked, steps(lambda m, _: m(data(32, 16)).square().mean()), policy)
    plan = plan_of(model)
    assert plan is not None
    again = {plan.graph.regions[m.region].ops[m.op].target for m in plan.timeline.moments if m.recompute}
    assert not any("topk" in target for target in again)


def test_indexing_is_equal_or_refused() -> None:
    use = steps(lambda m, _: m(data(32, 16)).square().mean())
    with warnings.catch_warnings(), contextlib.suppress(gs.errors.CaptureError):
        warnings.simplefilter("ignore")
        assert_equal_twins(Gathered, use)
