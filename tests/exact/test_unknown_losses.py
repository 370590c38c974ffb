"""Losses outside of the model, which no plan has seen: the budget holds for them, too."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import gradstow as gs
from gradstow._stow import plan_of
from gradstow.cost import measure_peak
from twins import data

WIDTH = 256
LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "square": lambda out, _: out.square().mean(),
    "mse": F.mse_loss,
    "difference": lambda out, target: (out - target).square().mean(),
    "l1": F.l1_loss,
    "smooth l1": F.smooth_l1_loss,
    "cross entropy": lambda out, target: F.cross_entropy(out, target.argmax(-1)),
    "smoothed": lambda out, target: F.cross_entropy(out, target.argmax(-1), label_smoothing=0.1),
    "bce": lambda out, target: F.binary_cross_entropy_with_logits(out, target.sigmoid()),
    "kl": lambda out, target: F.kl_div(out.log_softmax(-1), target.softmax(-1), reduction="batchmean"),
}


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, WIDTH)).train()


@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_peak_holds(name: str, half: bool) -> None:
    """The output is the largest value by far, so that the loss makes the peak."""
    model, x, target = net(), data(4096, 64), data(4096, WIDTH)
    plain = copy.deepcopy(model)
    gs.stow(model, policy="store-all")

    def peak(trained: torch.nn.Module) -> int:
        for _ in range(2):
            trained.zero_grad()
            with measure_peak("cpu") as memory:
                with torch.autocast("cpu", torch.bfloat16, enabled=half):
                    loss = LOSSES[name](trained(x), target)
                loss.backward()
            del loss
        return memory.peak_bytes

    measured, of_plain = peak(model), peak(plain)
    plan = plan_of(model)
    assert plan is not None
    assert measured <= plan.predicted_step_peak_bytes
    assert measured <= 1.01 * of_plain
