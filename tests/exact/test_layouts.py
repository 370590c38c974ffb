"""Gradients that arrive in another memory layout than the output has: eager sums in their order, and so do we."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradstow as gs
import twins
from equality import differences
from gradstow.capture import arrived_strides

pytestmark = pytest.mark.usefixtures("guessed_costs")


class Series(nn.Module):
    """Channels before time in the first part, after it in the second; sums over both in the first one's backward."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.conv, self.norm, self.scale = nn.Conv1d(16, 24, 5), nn.BatchNorm1d(24), nn.Parameter(torch.ones(24, 1))
        self.last, self.parts = nn.Linear(24, 8), parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.conv(x)).tanh() * self.scale
        if self.parts == 2:
            torch._dynamo.graph_break()
        return self.last(h.transpose(1, 2)) if self.parts else h


def squares(model: nn.Module, _step: int) -> torch.Tensor:
    """The gradient comes back with time before channels."""
    out = model(twins.data(3, 16, 83)).transpose(1, 2).reshape(3 * 79, -1)
    return (out @ twins.data(out.shape[1], 7)).square().mean()


def unplanned(model: nn.Module) -> int:
    run = model._compiled_call_impl.last
    return sum(p.unplanned_runs for e in run._executors.values() for p in e.programs)


@pytest.mark.parametrize("policy", twins.POLICIES)
@pytest.mark.parametrize("parts", [0, 1, 2])
def test_gradients_in_another_layout_are_equal(parts: int, policy: str) -> None:
    model = twins.assert_equal_twins(lambda: Series(parts), twins.steps(squares), policy)
    assert unplanned(model) == 3 * max(parts, 1)


@pytest.mark.parametrize("parts", [0, 2])
def test_it_would_be_seen(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With AOTAutograd's own copies the last bits differ."""
    monkeypatch.setattr("gradstow.execute._executor.keep_layouts", lambda: None)
    found = []
    for stow in (False, True):
        torch.manual_seed(0)
        model = Series(parts)
        found.append(twins.steps(squares)(gs.stow(model, policy="recompute-all") if stow else model))
    assert differences(*found) != []


def test_only_layouts_that_mean_something_are_told_apart() -> None:
    x = torch.zeros(4, 1, 6)
    assert arrived_strides([x], ((6, 999, 1),)) == ((6, 999, 1),)
    assert arrived_strides([x.transpose(0, 2)], ((4, 4, 1),)) == ((1, 6, 6),)
    assert arrived_strides([None], ((6, 6, 1),)) == ((6, 6, 1),)
