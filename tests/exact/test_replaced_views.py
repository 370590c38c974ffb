"""Copies and sums that are left out of a graph: what lies on them lies on their source, which others still read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradstow as gs
from gradstow._stow import plan_of
from gradstow.capture import _normalize


class Copies(nn.Module):
    """Every reader of ``base`` gets a copy of it, looks at that in another shape, and computes what fits over it."""

    def __init__(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.copy = copy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = self.base(x)
        parts = [(self.copy(base).view(-1, 4, 4).transpose(1, 2) * scale).sum(0) for scale in (0.5, 3.0, -2.0)]
        return self.head(sum(parts).reshape(1, 16)).square().sum() + base.square().sum()


COPIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clone": torch.clone,
    "dropout of nothing": lambda x: nn.functional.dropout(x, 0.0),
    "repeated once": lambda x: x.repeat_interleave(1, dim=0),
    "parts": lambda x: torch.cat(torch.clone(x).split(8, dim=1), dim=1),
}


class Absent(nn.Module):
    """Two results of one layer, seen in another shape; of a sum of gradients, one never arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        base = self.base(x).tanh()
        left = self.left(base.view(-1, 2, 8).transpose(0, 1).reshape(-1, 16))
        return left.square().sum(), self.right(base).square().sum()


def train(model: nn.Module, loss: Callable[[Any], torch.Tensor]) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        value = loss(model(torch.randn(64, 16, generator=torch.Generator().manual_seed(step))))
        value.backward()
        found += [value.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    return found


def both(make: Callable[[], nn.Module], loss: Callable[[Any], torch.Tensor]) -> tuple[list[Any], list[Any]]:
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    model = gs.stow(make(), budget="100%")
    found = train(plain, loss), train(model, loss)
    assert plan_of(model) is not None
    return found


def equal(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    assert len(one) == len(two) >= 3 * 5
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("kind", list(COPIES))
def test_a_copy_that_is_left_out_is_equal(kind: str) -> None:
    assert equal(*both(lambda: Copies(COPIES[kind]), lambda loss: loss))


@pytest.mark.parametrize("which", [0, 1])
def test_a_sum_that_is_left_out_is_equal(which: int) -> None:
    assert equal(*both(Absent, lambda results: results[which]))


def test_it_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the views' new place, one reader's result is written over what the next one reads."""
    monkeypatch.setattr(_normalize, "lay_views", lambda _graph: None)
    assert not equal(*both(lambda: Copies(torch.clone), lambda loss: loss))


def test_views_of_copies_that_are_handed_out_stay_on_memory_of_their_own() -> None:
    class Handing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            base = self.base(x)
            return base, base.clone().view(-1, 4, 4)

    model = gs.stow(Handing(), budget="100%")
    base, view = model(torch.randn(8, 16))
    before = view.detach().clone()
    base.detach().zero_()
    assert plan_of(model) is not None
    assert torch.equal(view, before)
