"""A21. inf or NaN in one of four micro-batches: the window is skipped once, the scheduler waits, the next is normal."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradstow.train._step import TrainStep

SCALE = 2.0**14


def make(unused: bool = False) -> tuple[nn.ModuleList, TrainStep]:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), nn.Linear(2, 2)])
    optimizers = [torch.optim.Adam(part.parameters(), 0.01) for part in model[: 2 if unused else 1]]
    rates = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]
    step = TrainStep(
        model,
        optimizers,
        loss=lambda output, batch: F.cross_entropy(output, batch[1]),
        forward=lambda module, batch: module[0](batch[0]),
        precision="fp16",
        scaler={"init_scale": SCALE},
        micro_batch=4,
        scheduler=rates,
        clip=1.0,
    )
    return model, step


def batch_of(seed: int, bad: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    own = torch.Generator().manual_seed(seed)
    x, y = torch.randn(16, 6, generator=own), torch.randint(0, 3, (16,), generator=own)
    if bad:
        x[5] = float("inf")  # in the second micro-batch
    return x, y


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(a: Any, b: Any) -> bool:
    return len(a) == len(b) > 0 and all(map(torch.equal, a, b))


@pytest.mark.parametrize("unused", [False, True])
def test_the_second_of_four_micro_batches_is_bad(unused: bool) -> None:
    model, step = make(unused)
    assert step(batch_of(0)).skipped is None
    before, states = weights(model), copy.deepcopy([o.state_dict() for o in step.optimizers])
    result = step(batch_of(1, bad=True))
    assert result.micro_batches == 4
    assert result.skipped
    assert result.grad_norm != result.grad_norm
    assert step.scaler is not None
    assert step.scaler.get_scale() == SCALE / 2
    assert equal(before, weights(model))
    for now, then in zip(step.optimizers, states, strict=True):
        assert now.state_dict()["param_groups"] == then["param_groups"]
        for index, entries in then["state"].items():
            assert equal([*entries.values()], [*now.state_dict()["state"][index].values()])
    assert not any(p.grad is not None for p in model.parameters())
    assert [s.last_epoch for s in step.schedulers] == [1] * len(step.schedulers)

    assert step(batch_of(2)).skipped is None
    other, clean = make(unused)
    clean(batch_of(0))
    clean.scaler.update(SCALE / 2)  # type: ignore[union-attr]
    clean(batch_of(2))
    assert equal(weights(other), weights(model)), "as if the bad window had never been"
    assert (step.steps, step.skipped_steps) == (2, 1)


def test_the_rate_decays_once_per_window() -> None:
    _, step = make()
    for seed in range(3):
        step(batch_of(seed))
    assert step.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.5**3)
