"""A6. unscale_ called twice: one unscaling, clipping, step and update per optimizer and window, across epoch ends."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradstow.train._clip import GlobalNorm
from gradstow.train._step import TrainStep


class Scaler(torch.amp.GradScaler):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__("cpu", init_scale=256.0)
        self.calls: Counter[str] = Counter()

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls["unscale"] += 1
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        self.calls["step"] += 1
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: Any = None) -> None:
        self.calls["update"] += 1
        super().update(new_scale)


class Clip(GlobalNorm):
    calls = 0

    def __call__(self, parameters: Any) -> Any:
        self.calls += 1
        return super().__call__(parameters)


def loss_of(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output, batch[1])


def make(optimizers: int = 1) -> TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    parts = [model] if optimizers == 1 else [model[0], model[2]]
    found = [torch.optim.SGD(p.parameters(), 0.1) for p in parts]
    return TrainStep(model, found, loss=loss_of, precision="fp16", scaler=Scaler(), clip=Clip(0.5), micro_batch=4)


def epoch(samples: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of 16 samples, that is four micro-batches, and what is left over."""
    x, y = torch.randn(samples, 6), torch.randint(0, 3, (samples,))
    return list(zip(x.split(16), y.split(16), strict=True))


def calls(step: TrainStep) -> tuple[int, int, int, int]:
    assert isinstance(step.scaler, Scaler)
    assert isinstance(step.clip, Clip)
    return step.scaler.calls["unscale"], step.scaler.calls["step"], step.scaler.calls["update"], step.clip.calls


def test_windows_that_an_epoch_cuts_short() -> None:
    step, sizes = make(), []
    for _ in range(2):
        sizes += [step(batch).micro_batches for batch in epoch(40)]  # ten micro-batches: windows of 4, 4 and 2
    assert sizes == [4, 4, 2] * 2
    assert calls(step) == (6, 6, 6, 6)
    assert step.steps == 6


def test_a_data_set_smaller_than_a_window() -> None:
    step = make()
    assert [step(batch).micro_batches for _ in range(2) for batch in epoch(7)] == [2, 2]
    assert calls(step) == (2, 2, 2, 2)


def test_two_optimizers() -> None:
    step = make(optimizers=2)
    for batch in epoch(40):
        step(batch)
    assert calls(step) == (6, 6, 3, 3)
    norms = [p.grad.norm() for p in step.model.parameters() if p.grad is not None]
    assert torch.stack(norms).norm() <= 0.5 + 1e-5, "clipped over both together"


def test_a_window_that_breaks_off_between_unscaling_and_step() -> None:
    step = make()
    clip, step.clip.max_norm = step.clip.max_norm, "not a number"  # type: ignore[assignment,union-attr]
    with pytest.raises(ValueError, match="not a number"):
        step(epoch(8)[0])
    step.clip.max_norm = clip  # type: ignore[union-attr]
    for batch in epoch(40):
        assert step(batch).skipped is None
    assert step.steps == 3
