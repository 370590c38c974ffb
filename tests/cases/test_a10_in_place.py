"""A10. In-place ops and views inside a region: equal wherever plain PyTorch accepts them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from twins import POLICIES, assert_equal_twins, data, steps


class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        return h[:].relu_()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        for layer in self.layers:
            x += torch.tanh(layer(x * 2))  # a linear layer of x itself would need x unchanged
        return x


class EditsItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return torch.tanh(self.last(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.first(x))


def _convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.ReLU(inplace=True))


def _dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.4, inplace=True), nn.Linear(16, 16))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", [Sliced, Residual, EditsItsInput, _dropping, _convolutional])
def test_in_place(make: Callable[[], nn.Module], policy: str) -> None:
    shape = (2, 1, 8, 8) if make is _convolutional else (8, 16)
    assert_equal_twins(make, steps(lambda m, _: m(data(*shape)).square().mean()), policy)
