"""Compiled plans in the life of a training loop: accumulation, retained graphs, absent gradients, other batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradstow as gs
from gradstow._stow import plan_of

pytestmark = pytest.mark.filterwarnings("ignore")


class Two(nn.Module):
    """Two outputs of one trunk, whose weights are used twice."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(width, 4 * width)
        self.second = nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)
        self.left, self.right = nn.Linear(width, 3), nn.Linear(width, 3)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(2):
            x = x + self.scale * self.second(nn.functional.gelu(self.first(self.norm(x))))
        return self.left(x), self.right(x)


Gradients = dict[str, torch.Tensor]
Loop = Callable[[Any, nn.Module, Callable[[int], torch.Tensor]], None]


def inputs_in(dtype: torch.dtype) -> Callable[[int], torch.Tensor]:
    def batch(rows: int) -> torch.Tensor:
        return torch.randn(rows, 16, generator=torch.Generator().manual_seed(rows)).to(dtype)

    return batch


def accumulate(call: Any, _module: nn.Module, batch: Callable[[int], torch.Tensor]) -> None:
    for rows in (256, 256, 96):
        left, right = call(batch(rows))
        (left.square().mean() + right.mean()).backward()


def retain(call: Any, _module: nn.Module, batch: Callable[[int], torch.Tensor]) -> None:
    left, right = call(batch(256))
    left.square().mean().backward(retain_graph=True)
    right.square().mean().backward()


def only_one(call: Any, _module: nn.Module, batch: Callable[[int], torch.Tensor]) -> None:
    call(batch(256))[1].square().mean().backward()


def change(call: Any, module: Any, batch: Callable[[int], torch.Tensor]) -> None:
    """The graph becomes another one between two forwards, then the first one again."""
    for scale in (1.0, 0.5, 1.0):
        module.scale = scale
        left, right = call(batch(256))
        (left.square().mean() + right.square().mean()).backward()


def freeze(call: Any, module: Any, batch: Callable[[int], torch.Tensor]) -> None:
    for frozen in (False, True, False):
        module.first.requires_grad_(not frozen)
        left, right = call(batch(256))
        (left.square().mean() + right.square().mean()).backward()


def ask(call: Any, module: nn.Module, batch: Callable[[int], torch.Tensor]) -> None:
    left, right = call(batch(256))
    wanted = list(module.parameters())
    for parameter, found in zip(wanted, torch.autograd.grad(left.sum() + right.square().sum(), wanted), strict=True):
        parameter.grad = found


# in the first three more than one plan is made, for what other batches and gradients take
BUDGETS: dict[Loop, str] = {
    accumulate: "1MiB",
    change: "1MiB",
    freeze: "1MiB",
    retain: "90%",
    only_one: "90%",
    ask: "90%",
}


def gradients(loop: Loop, how: str, dtype: torch.dtype = torch.float32) -> Gradients:
    torch.manual_seed(0)
    module = Two().to(dtype)
    call: Any = module
    if how == "compiled":
        call = torch.compile(module, dynamic=False)
    elif how == "stowed":
        gs.stow(module, budget=BUDGETS[loop], codegen="inductor")
    loop(call, module, inputs_in(dtype))
    assert how != "stowed" or plan_of(module) is not None
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def error(found: Gradients, exact: Gradients) -> float:
    assert found.keys() >= exact.keys()
    return max(float((found[n].double() - exact[n]).norm() / exact[n].norm()) for n in exact)


@pytest.mark.parametrize("loop", BUDGETS)
def test_gradients_are_as_near_to_float64_as_those_of_torch_compile(loop: Loop) -> None:
    exact = gradients(loop, "plain", torch.float64)
    assert len(exact) >= 6
    with torch._functorch.config.patch(donated_buffer=False):  # torch.compile retains no graph otherwise
        control = error(gradients(loop, "compiled"), exact)
    assert control > 0, "float32 is not float64"
    found = gradients(loop, "stowed")
    assert found.keys() == exact.keys(), "a gradient that plain PyTorch has not, or lacks"
    assert error(found, exact) <= 1.5 * control + 1e-7
