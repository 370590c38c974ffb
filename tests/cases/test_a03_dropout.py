"""A3. Dropout recomputed with another mask: gradients and the random stream are plain training's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from twins import POLICIES, assert_equal_twins, data, steps


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.drop, self.out = nn.Linear(16, 48), nn.Dropout(0.5), nn.Linear(16, 16)

    def forward(self, given: Any) -> torch.Tensor:
        x = given["x"] if isinstance(given, dict) else given[0] if isinstance(given, list) else given
        q, k, v = self.qkv(x).view(2, 6, 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3 if self.training else 0.0)
        return self.out(self.drop(y.transpose(1, 2).reshape(2, 6, 16)))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: {"x": x}], ids=["tensor", "list", "dict"])
def test_dropout_and_attention_dropout(wrap: Any, policy: str) -> None:
    assert_equal_twins(Attention, steps(lambda m, _: m(wrap(data(2, 6, 16))).square().mean()), policy)


class Unread(nn.Module):
    """Draws random numbers for results that nobody reads: the stream moves on all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(16, 16), nn.Dropout(0.4), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).tanh()
        self.drop(h).exp()
        torch.rand(3)
        F.scaled_dot_product_attention(h[None, None], h[None, None], h[None, None], dropout_p=0.5)
        return self.last(self.drop(h))


@pytest.mark.parametrize("policy", POLICIES)
def test_random_numbers_that_nobody_reads(policy: str) -> None:
    assert_equal_twins(Unread, steps(lambda m, _: m(data(6, 16)).square().mean()), policy)
