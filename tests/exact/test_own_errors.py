"""An error of the model itself reaches the user as in plain PyTorch, leaves the same state, and training goes on."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import gradstow as gs
from equality import Seen, differences, state
from gradstow._stow import is_stowed
from twins import data

pytestmark = pytest.mark.usefixtures("guessed_costs")


class Own(Exception):
    pass


def _raise(_h: torch.Tensor) -> torch.Tensor:
    raise Own("mine")


def _assert(h: torch.Tensor) -> torch.Tensor:
    assert h.dim() == 5, "five dimensions"
    return h


def _look_up(_h: torch.Tensor) -> torch.Tensor:
    return {}["absent"]  # type: ignore[no-any-return]


def _multiply(h: torch.Tensor) -> torch.Tensor:
    return h @ torch.ones(3, 3)


def _ask(h: torch.Tensor) -> torch.Tensor:
    if h.sum().item() > -1e9:
        raise Own("asked")
    return h


class Failing(nn.Module):
    def __init__(self, fail: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(8, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.3),
            nn.Linear(8, 4),
        )
        self.fail, self.bad = fail, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(torch.tanh(self.norm(self.first(x))))
        if self.bad:
            h = self.fail(h)
        return self.last(h)


FAILS = [_raise, _assert, _look_up, _multiply, _ask]


def _use(model: Failing, bad: int) -> tuple[Seen, list[str]]:
    """Five steps, of which one fails in the forward."""
    seen, errors = [], []
    for step in range(5):
        model.bad = step == bad
        model.zero_grad(set_to_none=True)
        try:
            model(data(6, 8, seed=step)).square().mean().backward()
        except (Own, AssertionError, KeyError, RuntimeError) as error:
            errors.append(f"{type(error).__name__}: {error}".splitlines()[0])
        seen += state(model, f"step {step}")
    return seen, errors


@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("fail", FAILS)
def test_own_errors(fail: Callable[[torch.Tensor], torch.Tensor], bad: int) -> None:
    torch.manual_seed(0)
    plain = Failing(fail)
    model = gs.stow(copy.deepcopy(plain), policy="recompute-all")
    found = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="gradstow")
        for twin in (plain, model):
            torch.manual_seed(1)
            found.append(_use(twin, bad))
    assert found[0][1] == found[1][1]
    assert len(found[0][1]) == 1
    assert differences(found[0][0], found[1][0]) == []
    assert is_stowed(model)


@pytest.mark.parametrize("fail", [_raise, _assert])
def test_planning_passes_them_on(fail: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = Failing(fail)
    model.bad = True
    with pytest.raises((Own, AssertionError), match="mine|five dimensions"):
        gs.plan(model, data(6, 8), loss=lambda out, _: out.square().mean())


def test_no_warning_for_an_error_that_is_raised_on_purpose() -> None:
    model = gs.stow(Failing(_raise), policy="recompute-all")
    model.bad = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Own, match="mine"):
            model(data(6, 8))
