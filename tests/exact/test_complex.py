"""Complex numbers: weights, buffers, transforms, lazy conjugates, rotations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from twins import POLICIES, assert_equal_twins, data, steps

pytestmark = pytest.mark.usefixtures("guessed_costs")
C64, C128 = torch.complex64, torch.complex128


class Weights(nn.Module):
    def __init__(self, dtype: torch.dtype = C64) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16, dtype=dtype), nn.Linear(16, 4, dtype=dtype)
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(torch.complex(x, 2 * x).to(self.dtype))))


class Conjugates(Weights):
    """Conjugates that are only marked as such, inside, saved and as the output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.first(x + 0j)
        z = z * z.conj().exp() + z.conj() @ self.first.weight.conj().sum(1).outer(self.first.bias)
        return self.last(z * z.abs() * z.angle().cos()).conj()


class Moving(Weights):
    """A moving average of complex numbers."""

    def __init__(self) -> None:
        super().__init__(C128)
        self.register_buffer("mean", torch.zeros(16, dtype=C128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x.to(C128))
        self.mean.mul_(0.9).add_(h.detach().mean(0) * 0.1)
        return self.last(torch.sigmoid(h - self.mean))


class Filter(nn.Module):
    """A learned filter between transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.filter = nn.Parameter(torch.randn(9, dtype=C64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.fft.irfft(torch.fft.rfft(torch.tanh(self.first(x))) * self.filter, n=16)
        return self.last(torch.fft.fft2(torch.tanh(h)).real)


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 64), nn.Linear(17, 4)
        self.register_buffer("window", torch.hann_window(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.stft(torch.tanh(self.first(x)), 32, 16, window=self.window, return_complex=True)
        return self.last(h.abs().square().mean(-1))


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("turns", torch.polar(torch.ones(8), torch.arange(8.0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.view_as_complex(torch.tanh(self.first(x)).view(-1, 8, 2))
        return self.last(torch.tanh(torch.view_as_real(h * self.turns).flatten(1)))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", [Weights, Conjugates, Moving, Filter, Spectrum, Rotary])
def test_complex_models(make: Callable[[], nn.Module], policy: str) -> None:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return model(data(6, 8, seed=step)).abs().square().mean()

    assert_equal_twins(make, steps(loss), policy)
