"""What a rehearsal on fakes cannot foresee: the first real step is recorded, and planned from then on."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import gradstow as gs
from equality import Seen, differences, state
from gradstow._stow import is_stowed, plan_of
from models import CASES, Case, first_four, rows, squares

pytestmark = pytest.mark.usefixtures("guessed_costs")

CONV = CASES["conv"]


class Plain(nn.Module):
    """Attributes that the forward reads, and that a user may change while training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.2)
        self.act, self.last, self.factor = nn.ReLU(), nn.Linear(32, 4), 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.act(self.norm(self.first(x)))) * self.factor)


class Branching(Plain):
    """Asks the data which way to go."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.act(self.norm(self.first(x)))
        if h.sum().item() > 0:
            h = h * 2
        return self.last(self.drop(h))


class Selecting(Plain):
    """The number of rows depends on the data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.act(self.norm(self.first(x)))
        rows = torch.nonzero(h[:, 0] > 0).squeeze(1)
        return self.last(h[rows]).sum(0).expand(8, 4)


SMALL = Case(Plain, rows(), squares)


def steps(model: nn.Module, batch: Any, change: Callable[[nn.Module], None], count: int = 6) -> Seen:
    """Steps with ``change`` made before the fourth one."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    seen: Seen = []
    for step in range(count):
        if step == 3:
            change(model)
        torch.manual_seed(step)
        optimizer.zero_grad(set_to_none=True)
        loss = squares(model(batch[0]), batch)
        loss.backward()
        seen += [(f"loss {step}", loss.detach().clone()), *state(model, f"step {step}")]
        optimizer.step()
    return seen


def nothing(_model: nn.Module) -> None:
    pass


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "a number": lambda model: setattr(model, "factor", 3.0),
    "dropout's p": lambda model: setattr(model.drop, "p", 0.4),
    "a module": lambda model: setattr(model, "act", nn.GELU()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changes_while_training_is_planned_anew(change: str, device: str) -> None:
    batch = SMALL.data(device)
    expected = steps(SMALL.model(device), batch, CHANGES[change])
    model = gs.stow(SMALL.model(device), policy="recompute-all")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a rehearsal does it: nothing has to be said
        assert differences(expected, steps(model, batch, CHANGES[change])) == []
    assert plan_of(model).rerun_ops > 0


def test_a_model_that_changes_back_and_forth_keeps_its_plans(device: str) -> None:
    model = gs.stow(SMALL.model(device), policy="recompute-all")
    plans = []
    for step in range(6):
        model.factor = 2.0 + step % 2
        squares(model(SMALL.data(device)[0]), SMALL.data(device)).backward()
        model.zero_grad(set_to_none=True)
        plans.append(plan_of(model))
    assert len({id(plan) for plan in plans}) == 2


def _hooked(make: Callable[[list[Any]], Any]) -> Callable[[nn.Module], list[Any]]:
    def register(model: nn.Module) -> list[Any]:
        seen: list[Any] = []
        model.first.register_forward_hook(make(seen))
        return seen

    return register


def _backward_hook(model: nn.Module) -> list[Any]:
    seen: list[Any] = []
    model.last.register_full_backward_hook(lambda *_: seen.append(1))
    return seen


HOOKS: dict[str, Callable[[nn.Module], list[Any]]] = {
    "reads a number": _hooked(lambda seen: lambda _m, _i, out: seen.append(out.detach().mean().item())),
    "changes the output": _hooked(lambda seen: lambda _m, _i, out: (seen.append(1), out * 2)[1]),
    "keeps the output": _hooked(lambda seen: lambda _m, _i, out: seen.append(out)),
    "backward": _backward_hook,
}


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_that_are_there_before_fire_as_often_and_are_planned(hook: str, device: str) -> None:
    batch, found = SMALL.data(device), []
    for stow in (False, True):
        model = SMALL.model(device)
        fired = HOOKS[hook](model)
        if stow:
            gs.stow(model, policy="recompute-all")
            with pytest.warns(UserWarning, match="recorded as it runs, may exceed the budget"):
                seen = steps(model, batch, nothing)
            assert plan_of(model).rerun_ops > 0
            assert is_stowed(model)
        else:
            seen = steps(model, batch, nothing)
        numbers = [torch.as_tensor(f, dtype=torch.float64).sum().detach() for f in fired]
        found.append([*seen, *((f"hook {i}", n) for i, n in enumerate(numbers))])
        assert numbers
    assert differences(*found) == []


@pytest.mark.parametrize("kind", [Branching, Selecting])
def test_code_that_asks_the_data_is_planned_from_its_first_real_step(kind: type[Plain], device: str) -> None:
    case = Case(kind, rows(), squares)
    batch = case.data(device)
    expected = steps(case.model(device), batch, nothing, 4)
    model = gs.stow(case.model(device), policy="recompute-all")
    with pytest.warns(UserWarning, match="recorded"):
        assert differences(expected, steps(model, batch, nothing, 4)) == []
    plan = plan_of(model)
    assert plan.rerun_ops > 0
    assert plan.graph.breaks
    with pytest.raises(gs.errors.CaptureError, match="records the first real step"):
        gs.plan(case.model(device), batch, loss=squares)


def test_a_recorded_step_keeps_its_budget_from_then_on(device: str) -> None:
    class Wide(Branching):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(256, 512), nn.BatchNorm1d(512)
            self.last = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(6)))

    case = Case(Wide, rows(256, count=2048), first_four)
    batch = case.data(device)
    model = gs.stow(case.model(device), "70%")
    with pytest.warns(UserWarning, match="recorded"):
        case.run(model, batch).backward()
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        with gs.measure_peak(device) as memory:
            case.run(model, batch).backward()
        plan = plan_of(model)
        assert memory.peak_bytes <= plan.predicted_step_peak_bytes <= 0.7 * plan.plain_step_peak_bytes


@dataclass(frozen=True)
class Pair:
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Found:
    out: torch.Tensor
    note: str = ""


class Wrapped(Plain):
    def forward(self, pair: Pair) -> Found:  # type: ignore[override]
        return Found(super().forward(pair.x))


def test_dataclasses_go_in_and_out(device: str) -> None:
    def loss(found: Found, pair: Pair) -> torch.Tensor:
        return (found.out - pair.y).square().mean()

    torch.manual_seed(0)
    batch = Pair(torch.randn(8, 16, device=device), torch.randn(8, 4, device=device))
    proof = gs.verify(Wrapped().to(device), batch, loss=loss, policy="recompute-all", rounds=1)
    assert proof.ok
    assert proof.rerun_ops > 0
    assert proof.plan.graph.resident.batch == batch.x.nbytes + batch.y.nbytes
    model = gs.stow(Wrapped().to(device), policy="recompute-all")
    loss(model(batch), batch).backward()
    assert plan_of(model).graph.reserve_bytes == 6 * batch.y.nbytes


def test_a_model_that_no_graph_holds_is_refused_by_name(device: str) -> None:
    """A hook on the backward of a part of a Sequential: PyTorch's tracer leaves out the whole call."""
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.GELU()))).to(device)
    model[2].register_full_backward_hook(lambda *_: None)
    gs.stow(model, "100%")
    with pytest.raises(gs.errors.CaptureError, match="no part of Sequential could be captured, so no budget can hold"):
        model(torch.randn(8, 16, device=device))
    assert not is_stowed(model)
    recurrent = gs.stow(nn.LSTM(8, 8).to(device), "100%")
    with pytest.raises(gs.errors.CaptureError, match="no part of LSTM could be captured"):
        recurrent(torch.randn(3, 2, 8, device=device))
    assert copy.deepcopy(recurrent)._compiled_call_impl is None
