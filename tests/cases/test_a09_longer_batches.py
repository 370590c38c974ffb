"""A9. A later batch is longer than the one the plan was made for: planned anew under the budget, or refused by name."""

from __future__ import annotations

import pytest
import torch

import gradstow as gs
from models import Transformer, token_loss


def _tokens(count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 29, (count, length), generator=torch.Generator().manual_seed(length))
    return ids, ids.roll(-1, 1)


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return Transformer(p=0.0, width=32).train()


def _peak(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> int:
    model.zero_grad(set_to_none=True)
    with gs.measure_peak("cpu") as memory:
        token_loss(model(batch[0]), batch).backward()
    return memory.peak_bytes


def test_every_length_is_under_the_budget_or_refused() -> None:
    model, plain = _model(), _model()
    resident = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    budget = resident + 3 * _peak(plain, _tokens(4, 32)) // 2
    gs.stow(model, budget)
    for count, length in ((4, 16), (4, 16), (4, 32), (4, 8), (1, 16)):
        batch = _tokens(count, length)
        peak = _peak(model, batch)
        assert resident + batch[0].nbytes + peak <= budget
        _peak(plain, batch)
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
    with pytest.raises(gs.errors.BudgetTooSmall, match="smallest budget is") as error:
        model(_tokens(64, 64)[0])
    assert error.value.minimum_bytes > budget


def test_plans_are_bounded_and_the_least_recently_used_leaves() -> None:
    model = gs.stow(_model(), "100%", max_plans=2)
    for length in (8, 12, 8, 16, 8):
        _peak(model, _tokens(2, length))
    kept = [str(key[0]) for key in model._compiled_call_impl._runs]
    assert ["(2, 16)" in kept[0], "(2, 8)" in kept[1], len(kept)] == [True, True, 2]
    with pytest.raises(gs.errors.GradstowError, match="max_plans=0"):
        gs.stow(_model(), "100%", max_plans=0)
