"""Models that ask whether they are being compiled go the way that they go in plain PyTorch."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import gradstow as gs
import twins
from equality import differences
from gradstow._stow import plan_of
from gradstow.capture import was_told

pytestmark = pytest.mark.usefixtures("guessed_costs")


class Asking(nn.Module):
    """Sums in another order when it is compiled, as some models of transformers do."""

    def __init__(self, careful: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.careful = nn.Linear(16, 32), nn.Linear(32, 4), careful

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).tanh()
        if self.careful:  # without a compiler it looks at the data, and gives the same numbers
            return self.last(h * 2) if torch.compiler.is_compiling() or h.abs().sum().item() > 0 else h
        parts = h.unbind(1)
        if torch.compiler.is_compiling():
            parts = parts[::-1]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return self.last(h) * total[:, None]


def loss(output: torch.Tensor, _batch: object = None) -> torch.Tensor:
    return output.square().mean()


def use(model: nn.Module, _step: int) -> torch.Tensor:
    return loss(model(twins.data(8, 16)))


def quietly(make: type[Asking], careful: bool) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing has to be recorded
        return twins.assert_equal_twins(lambda: make(careful), twins.steps(use))


def test_it_hears_no_and_goes_plains_way() -> None:
    assert not was_told(plan_of(quietly(Asking, careful=False)).graph)


def test_it_hears_yes_where_that_keeps_the_step_in_one_graph() -> None:
    plan = plan_of(quietly(Asking, careful=True))
    assert was_told(plan.graph)
    assert not plan.graph.breaks


@pytest.mark.parametrize("careful", [False, True])
def test_a_saved_plan_knows_what_the_model_heard(careful: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Asking(careful)
    batch = twins.data(8, 16)
    plan = gs.plan(plain, batch, loss=loss, policy="recompute-all", forward=lambda model, x: model(x))
    plan.save(tmp_path / "plan.json")
    torch.manual_seed(0)
    stowed = gs.stow(Asking(careful), plan=gs.Plan.load(tmp_path / "plan.json"))
    assert differences(twins.steps(use)(plain), twins.steps(use)(stowed)) == []


def test_the_answer_holds_only_inside() -> None:
    quietly(Asking, careful=False)
    heard = []
    torch.compile(lambda x: (heard.append(torch.compiler.is_compiling()), x + 1)[1], backend="eager")(torch.ones(2))
    assert heard == [True]
