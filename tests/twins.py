"""Run the same training on a plain and on a stowed twin of a model, and compare everything."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradstow as gs
from equality import Seen, differences, state

Use = Callable[[torch.nn.Module], Seen]
POLICIES = ("recompute-all", "tight")


def assert_equal_twins(
    make: Callable[[], torch.nn.Module], use: Use, policy: str | dict[str, str] = "recompute-all"
) -> torch.nn.Module:
    """``use`` sees the same on a plain model and on one stowed by a policy; returns the stowed one.

    "tight" is the smallest budget that the planner says it can meet.
    """
    torch.manual_seed(0)
    plain = make().train()
    stowed = copy.deepcopy(plain)
    if policy == "tight":
        gs.stow(stowed, _smallest(plain, use))
    else:
        gs.stow(stowed, policy=policy)
    found = []
    for model in (plain, stowed):
        torch.manual_seed(1)
        found.append(use(model))
    assert differences(*found) == []
    return stowed


def _smallest(model: torch.nn.Module, use: Use) -> int:
    """A budget of one byte is raised to what each refusal names, until every step fits."""
    with pytest.raises(gs.errors.BudgetTooSmall) as refused:
        use(gs.stow(copy.deepcopy(model), 1))
    budgets = [1, refused.value.minimum_bytes]
    while budgets[-1] > budgets[-2]:
        budgets.append(_raised(model, use, budgets[-1]))
    assert budgets[-1] == budgets[-2], "what a refusal names is enough for the step that it refuses"
    return budgets[-1]


def _raised(model: torch.nn.Module, use: Use, budget: int) -> int:
    """The budget, or what a later step of other needs asks for."""
    try:
        use(gs.stow(copy.deepcopy(model), budget))
    except gs.errors.BudgetTooSmall as error:
        return error.minimum_bytes
    return budget


def steps(
    loss: Callable[[torch.nn.Module, int], torch.Tensor],
    count: int = 3,
    before: Callable[[torch.nn.Module, int], Any] = lambda _model, _step: None,
) -> Use:
    """Training steps with SGD: ``loss(model, step)`` runs the forward. Looks at everything after each backward."""

    def use(model: torch.nn.Module) -> Seen:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        seen: Seen = []
        for step in range(count):
            before(model, step)
            optimizer.zero_grad(set_to_none=True)
            value = loss(model, step)
            value.backward()
            seen += [(f"loss {step}", value.detach().clone()), *state(model, f"step {step}")]
            optimizer.step()
        return seen + [(f"parameter {n} at the end", p.detach().clone()) for n, p in model.named_parameters()]

    return use


def data(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
