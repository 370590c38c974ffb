"""A11. Gradient penalties are refused by name and equal under gs.plain; several backwards of one forward are equal."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradstow as gs
from equality import Seen, state
from twins import assert_equal_twins, data


def critic() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def _penalty(model: nn.Module) -> Seen:
    x = data(4, 16).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    ((gradient.norm(dim=1) - 1) ** 2).mean().backward()
    return state(model, "the penalty")


def _penalty_plainly(model: nn.Module) -> Seen:
    with gs.plain():
        return _penalty(model)


def _two_losses(model: nn.Module) -> Seen:
    output = model(data(4, 16))
    output.square().mean().backward(retain_graph=True)
    output.abs().mean().backward()
    return state(model, "two losses")


def _a_subset(model: nn.Module) -> Seen:
    loss = model(data(4, 16)).square().mean()
    found = torch.autograd.grad(loss, [model[0].weight, model[4].bias])
    return [(f"gradient {i}", g) for i, g in enumerate(found)]


@pytest.mark.parametrize("use", [_penalty_plainly, _two_losses, _a_subset])
def test_equal(use: object) -> None:
    assert_equal_twins(critic, use)  # type: ignore[arg-type]


def test_a_penalty_is_refused_by_name() -> None:
    with pytest.raises(gs.errors.CaptureError, match=r"create_graph=True.*gs\.plain"):
        _penalty(gs.stow(critic(), policy="recompute-all"))
