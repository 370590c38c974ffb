"""Embeddings with sparse gradients, and the optimizer that takes nothing else, in whole training steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from equality import differences
from gradstow.train._step import TrainStep

Tensor = torch.Tensor


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16, sparse=True)
        self.body = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 5))

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(self.words(ids).mean(1))


class Asking(Words):
    """Cannot be rehearsed: its first step is recorded."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids).mean(1)
        return self.body(x if float(x.detach().sum()) > -1e9 else -x)


def optimizers(model: Words) -> list[torch.optim.Optimizer]:
    adam = torch.optim.AdamW(model.body.parameters(), 1e-2, foreach=False)
    return [torch.optim.SparseAdam(list(model.words.parameters()), 1e-2), adam]


def trained(model: Words, **options: Any) -> tuple[list[tuple[str, Tensor]], list[int | None]]:
    step = TrainStep(model, optimizers(model), loss=lambda o, b: F.cross_entropy(o, b[1]), **options)
    torch.manual_seed(3)
    results = [step((torch.randint(0, 50, (32, 7)), torch.randint(0, 5, (32,)))) for _ in range(3)]
    assert [r.skipped for r in results] == [None] * 3
    return [(n, p.detach().clone()) for n, p in model.named_parameters()], [r.peak_bytes for r in results]


@pytest.mark.parametrize(
    "options",
    [{}, {"micro_batch": 16}, {"precision": "fp16"}, {"optimizer_in_backward": True}],
    ids=lambda options: next(iter(options), "whole"),
)
def test_sparse_adam_under_a_budget_is_plain(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Words()
    expected, _ = trained(copy.deepcopy(model), **options)
    got, peaks = trained(model, budget="1MB" if options else "90%", **options)
    assert differences(expected, got) == []
    assert all(peaks), "each step had a plan"


def test_auto_chooses_with_it() -> None:
    torch.manual_seed(0)
    model = Words()
    expected, _ = trained(copy.deepcopy(model), micro_batch=16)
    got, _ = trained(model, micro_batch="auto", budget="1MB")
    worst = max(float((a - b).abs().max()) for (_, a), (_, b) in zip(expected, got, strict=True))
    assert worst < 1e-5


@pytest.mark.filterwarnings("ignore:gradstow. this step of Asking is recorded")
def test_a_recorded_step_is_planned_with_it() -> None:
    torch.manual_seed(0)
    model = Asking()
    expected, _ = trained(copy.deepcopy(model))
    got, peaks = trained(model, budget="2MB")
    assert differences(expected, got) == []
    assert peaks[-1] is not None
