"""Gradients of a tensor that is used inside of a graph and after it are added up in plain PyTorch's order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import gradstow as gs
from gradstow._stow import is_stowed
from twins import assert_equal_twins, data, steps

pytestmark = pytest.mark.usefixtures("guessed_costs")


class Inner(nn.Module):
    """Uses its input several times, twice of them in one op."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(x)) + x * x * 0.3


class Around(nn.Module):
    """A residual connection around a part that graph breaks set apart, and a weight that is used on both sides."""

    def __init__(self, cut: bool = True) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(16, 16), Inner(), nn.Linear(16, 4)
        self.cut = cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.cut:
            torch._dynamo.graph_break()
        h = self.inner(self.inner(x))
        if self.cut:
            torch._dynamo.graph_break()
        h = x * 0.7 + torch.tanh(self.inner.layer(h)) + x.sigmoid()
        return self.last(h + self.inner.layer(h))


class AroundRecurrent(Around):
    def __init__(self) -> None:
        super().__init__(cut=False)
        self.rnn = nn.GRU(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        h, _ = self.rnn(self.inner(x))
        return super().forward(x + h + self.inner(x * h))


@pytest.mark.parametrize("policy", ["store-all", "recompute-all"])
@pytest.mark.parametrize("make", [Around, AroundRecurrent])
def test_uses_on_both_sides_of_a_break(make: Callable[[], nn.Module], policy: str) -> None:
    assert_equal_twins(make, steps(lambda m, step: m(data(8, 16, seed=step)).square().mean(), 5), policy)


def test_uses_on_both_sides_of_a_stowed_part() -> None:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        if is_stowed(model):
            gs.unstow(model)
            gs.stow(model.inner, policy="recompute-all")
        return model(data(8, 16, seed=step)).square().mean()

    assert_equal_twins(lambda: Around(cut=False), steps(loss, 5))
