"""Large batches: the scaled rate, its warm-up, and LARS and LAMB from timm."""

from __future__ import annotations

import builtins
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from gradstow._errors import GradstowError
from gradstow.train._groups import parameter_groups
from gradstow.train._large import lamb, lars, linear_warmup, scaled_lr


def test_the_rate_follows_the_batch() -> None:
    assert scaled_lr(0.1, 256, 256) == 0.1
    assert scaled_lr(0.1, 8192, 256) == pytest.approx(3.2)
    assert scaled_lr(0.1, 64, 256) == pytest.approx(0.025)
    assert scaled_lr(1e-3, 1024, 256, rule="sqrt") == pytest.approx(2e-3)


@pytest.mark.parametrize("wrong", [(0.0, 1, 1), (math.nan, 1, 1), (0.1, 0, 1), (0.1, 1, 0)])
def test_rates_that_mean_nothing_are_refused(wrong: tuple[float, int, int]) -> None:
    with pytest.raises(GradstowError, match="positive"):
        scaled_lr(*wrong)
    with pytest.raises(GradstowError, match="cubic"):
        scaled_lr(0.1, 2, 1, rule="cubic")


def rates(optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def sgd(lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=lr)


def test_the_warmup_rises_evenly_and_stays() -> None:
    optimizer = sgd(0.8)
    found = rates(optimizer, linear_warmup(optimizer, 4), 7)
    assert found == pytest.approx([0.8 * s for s in (0.2, 0.4, 0.6, 0.8, 1, 1, 1)])
    optimizer = sgd(0.8)
    assert rates(optimizer, linear_warmup(optimizer, 2, start=0.5), 4) == pytest.approx([0.4, 0.6, 0.8, 0.8])


def test_what_follows_starts_when_the_warmup_is_over() -> None:
    optimizer = sgd()
    found = rates(optimizer, linear_warmup(optimizer, 5, after=CosineAnnealingLR(optimizer, 10)), 15)
    assert found[:5] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6])
    assert found[5:] == pytest.approx([(1 + math.cos(math.pi * i / 10)) / 2 for i in range(10)])


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"steps": 2.0}, {"steps": 2, "start": 0.0}, {"steps": 2, "start": 2}])
def test_warmups_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(GradstowError):
        linear_warmup(sgd(), **wrong)


def test_a_schedule_of_another_optimizer_is_refused() -> None:
    with pytest.raises(GradstowError, match="another optimizer"):
        linear_warmup(sgd(), 2, after=CosineAnnealingLR(sgd(), 10))


@pytest.mark.parametrize("name", ["Lars", "Lamb"])
def test_they_are_timms(name: str) -> None:
    timm = pytest.importorskip("timm")
    ends = []
    for door in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
        if door:
            optimizer = (lars if name == "Lars" else lamb)(model, 0.1, weight_decay=0.01)
        else:
            groups = parameter_groups(model, 0.01)
            optimizer = getattr(timm.optim, name)(groups, lr=0.1, weight_decay=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        ends.append(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_options_and_plain_parameters_reach_them() -> None:
    pytest.importorskip("timm")
    model = nn.Linear(2, 2)
    optimizer = lars(model.parameters(), 0.5, momentum=0.9, trust_coeff=0.02)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["momentum"], group["trust_coeff"]) == (0.5, 0.9, 0.02)
    assert lamb(model, 0.1, max_grad_norm=None).param_groups[0]["max_grad_norm"] is None


def test_without_timm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "timm":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    for door in (lars, lamb):
        with pytest.raises(GradstowError, match=r"gradstow\[vision\]"):
            door(nn.Linear(2, 2), 0.1)
