"""A22. An error in the middle, then a retry: it comes unchanged, nothing is left behind, the next step is fresh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from equality import Seen, state
from gradstow._stow import is_stowed
from twins import assert_equal_twins, data


class Trouble(Exception):
    pass


class Raises(torch.autograd.Function):
    """Raises in the forward or in the backward, when it is told to."""

    kind: type[BaseException] | None = None

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if Raises.kind is not None:
            raise Raises.kind("in the backward")
        return grad


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.3)
        self.kind: type[BaseException] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind is not None:
            raise self.kind("in the forward")
        return x + self.drop(torch.tanh(self.norm(self.layer(x))))


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kind", [Trouble, KeyboardInterrupt])
def test_a_failed_step_and_the_next_ones(kind: type[BaseException], where: str, step: int) -> None:
    if kind is KeyboardInterrupt and (where, step) == ("forward", 0):
        pytest.skip("it ends the planning, before anything of the step runs: see test_refusals")
    raised: list[str] = []

    def use(model: nn.Module) -> Seen:
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        seen: Seen = []
        for number in range(4):
            optimizer.zero_grad(set_to_none=True)
            model[1].kind = kind if where == "forward" and number == step else None
            Raises.kind = kind if where == "backward" and number == step else None
            try:
                Raises.apply(model(data(8, 16, seed=number))).square().mean().backward()
                optimizer.step()
            except (Trouble, KeyboardInterrupt) as error:
                raised.append(f"{type(error).__name__}: {error}")
            modes = [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), model.training]
            seen += [*state(model, f"step {number}"), ("modes", torch.tensor(modes))]
        return seen

    model = assert_equal_twins(lambda: nn.Sequential(Block(), Block(), nn.Linear(16, 4)), use)
    assert raised == [f"{kind.__name__}: in the {where}"] * 2
    assert is_stowed(model) or (kind is KeyboardInterrupt and where == "forward")
