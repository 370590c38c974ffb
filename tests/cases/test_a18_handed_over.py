"""A18. Keys, values or features handed from one block to a later one, through a dict or an attribute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from twins import POLICIES, assert_equal_twins, data, steps


class SharesKeys(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.ModuleList(nn.Linear(16, 16) for _ in range(3)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache: dict[str, torch.Tensor] = {}
        for number in range(3):
            if number == 0:
                cache["k"] = self.key[number](x)
            k = cache["k"] if number == 2 else self.key[number](x)
            x = x + F.scaled_dot_product_attention(self.query[number](x), k, self.value[number](x))
        return x


class KeepsFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.feat: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.feat = torch.tanh(self.first(x))
        return torch.tanh(self.last(self.feat))


class Skips(nn.Module):
    """A U: what goes down comes back up beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(32, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for layer in self.down:
            x = torch.tanh(layer(x))
            kept.append(x)
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([x, kept.pop()], -1)))
        return x


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", [SharesKeys, Skips])
def test_values_that_travel(make: Callable[[], nn.Module], policy: str) -> None:
    assert_equal_twins(make, steps(lambda m, _: m(data(2, 6, 16)).square().mean()), policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_attribute_that_an_extra_loss_reads(policy: str) -> None:
    def loss(model: nn.Module, _step: int) -> torch.Tensor:
        output = model(data(8, 16))
        return output.square().mean() + 0.1 * model.feat.abs().mean()

    assert_equal_twins(KeepsFeatures, steps(loss), policy)
