"""A12. A custom autograd.Function reads ctx.saved_tensors twice: plain accepts it, and so do we."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gradstow._stow import plan_of
from twins import POLICIES, assert_equal_twins, data, steps


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return torch.tanh(x @ w)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = ctx.saved_tensors[0]
        w = ctx.saved_tensors[1]
        grad = grad * (1 - torch.tanh(x @ w) ** 2)
        return grad @ w.T, x.T @ grad


class SavesTheMiddle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        middle = torch.exp(-x * x)
        ctx.save_for_backward(x, middle)
        return middle * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, middle = ctx.saved_tensors
        return grad * middle * (1 - 2 * x * x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(16, 16) / 4), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(SavesTheMiddle.apply(ReadsTwice.apply(x, self.weight)))


@pytest.mark.parametrize("policy", POLICIES)
def test_custom_functions(policy: str) -> None:
    assert_equal_twins(Net, steps(lambda m, _: m(data(8, 16)).square().mean()), policy)


class WritesOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.relu_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x.gt(0))
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[0]


class BehindABreak(nn.Module):
    """Captured there, the function's gradient would be the identity's without a word."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.last(WritesOver.apply(x))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_custom_function_that_writes_over_a_graphs_input(policy: str) -> None:
    stowed = assert_equal_twins(BehindABreak, steps(lambda m, _: m(data(8, 16)).square().mean()), policy)
    plan = plan_of(stowed)
    assert plan is not None
    assert any("custom function" in b.reason for b in plan.graph.breaks)
