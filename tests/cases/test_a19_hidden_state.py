"""A19. Hidden state that drives the maths: spectral norm, a moving codebook, counters, first-batch initialisation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from twins import POLICIES, assert_equal_twins, data, steps


def _spectral() -> nn.Module:
    return nn.Sequential(spectral_norm(nn.Linear(16, 16)), nn.Tanh(), old_spectral_norm(nn.Linear(16, 4)))


def _weight() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Linear(16, 16)), nn.Tanh(), weight_norm(nn.Linear(16, 4)))


class Codebook(nn.Module):
    """A vector quantiser whose codes move fast."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(16, 4), nn.Linear(4, 16)
        self.register_buffer("codes", torch.randn(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.tanh(self.encode(x))
        nearest = torch.cdist(z.detach(), self.codes).argmin(-1)
        chosen = self.codes[nearest]
        with torch.no_grad():
            sums = torch.zeros_like(self.codes).index_add(0, nearest, z.detach())
            counts = torch.zeros(8).index_add(0, nearest, torch.ones(len(z)))
            means = sums / counts.clamp(min=1)[:, None]
            self.codes.copy_(torch.where(counts[:, None] > 0, 0.1 * self.codes + 0.9 * means, self.codes))
        out = self.decode(z + (chosen - z).detach())
        return out + (z - chosen).square().mean()


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x) * (1 + self.steps))
        self.steps += 1
        return self.last(torch.tanh(h))


class ActNorm(nn.Module):
    """Takes its scale from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(16)), nn.Linear(16, 16)
        self.ready = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        if not self.ready:
            with torch.no_grad():
                self.scale.copy_(1 / (h.std(0) + 1e-6))
            self.ready = True
        return torch.tanh(h * self.scale)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", [_spectral, _weight, Codebook, Counter, ActNorm])
def test_hidden_state(make: Callable[[], nn.Module], policy: str) -> None:
    assert_equal_twins(make, steps(lambda m, _: m(data(8, 16)).square().mean()), policy)
