"""A1. A loss averaged per micro-batch and then averaged again: gradient and loss are the unsplit batch's instead."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradstow.train._step import TrainStep

SIZES = (2, 10, 3)


def parts_of(x: torch.Tensor, y: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(x.split(SIZES), y.split(SIZES), strict=True))


def classifier() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 5)


def mean(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), batch[1].flatten())


def counted(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return mean(output, batch), (batch[1] != -100).sum()


def relative(model: nn.Linear, exact: nn.Linear) -> float:
    a, b = (torch.cat([m.weight.grad.flatten(), m.bias.grad]) for m in (model, exact))
    return float((a - b).norm() / b.norm())


def run(loss: Any, parts: list[Any], whole: Any) -> tuple[float, float, float]:
    """(relative error of the gradient, loss of the window, loss of the whole batch)."""
    model = classifier()
    exact = copy.deepcopy(model)
    expected = mean(exact(whole[0]), whole)
    expected.backward()
    result = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss=loss).window(parts)
    assert result.skipped is None
    return relative(model, exact), result.loss, expected.item()


def test_a_mean_over_samples() -> None:
    torch.manual_seed(1)
    x, y = torch.randn(15, 4) * torch.arange(1, 16)[:, None], torch.randint(0, 5, (15,))
    error, loss, expected = run(mean, parts_of(x, y), (x, y))
    assert error <= 1e-6
    assert loss == pytest.approx(expected, rel=1e-6)


def test_a_mean_over_valid_tokens_with_other_numbers_of_them_in_each_row() -> None:
    torch.manual_seed(1)
    x, y = torch.randn(15, 7, 4), torch.randint(0, 5, (15, 7))
    y[torch.arange(7) >= (torch.arange(15) * 3 % 8)[:, None]] = -100
    y[0, 0], x[0] = 1, x[0] * 9
    error, loss, expected = run(counted, parts_of(x, y), (x, y))
    assert error <= 1e-6
    assert loss == pytest.approx(expected, rel=1e-6)


def test_a_micro_batch_whose_labels_are_all_ignored_has_no_weight() -> None:
    torch.manual_seed(1)
    x, y = torch.randn(15, 7, 4), torch.randint(0, 5, (15, 7))
    for ignored in (slice(0, 2), slice(2, 12), slice(12, 15)):  # the first, the middle, the last micro-batch
        labels = y.clone()
        labels[ignored] = -100
        parts = parts_of(x, labels)
        assert any(mean(classifier()(p[0]), p).isnan() for p in parts)
        error, loss, expected = run(counted, parts, (x, labels))
        assert error <= 1e-6
        assert loss == pytest.approx(expected, rel=1e-6)


def test_the_comparison_sees_the_fault() -> None:
    torch.manual_seed(1)
    x, y = torch.randn(15, 4) * torch.arange(1, 16)[:, None], torch.randint(0, 5, (15,))
    model, exact = classifier(), classifier()
    mean(exact(x), (x, y)).backward()
    for part in parts_of(x, y):
        (mean(model(part[0]), part) / len(SIZES)).backward()
    assert relative(model, exact) > 0.1
