"""A tensor that a forward makes from numbers is a constant of the graph: there whenever it is asked for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradstow as gs
from gradstow.errors import BudgetTooSmall
from gradstow.ir import StorageKind
from twins import POLICIES, assert_equal_twins, data, steps

WIDTH = 4096


class Windowed(nn.Module):
    """The backward of each multiplication reads the window."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        window = torch.tensor([float(i % 7) for i in range(WIDTH)])
        for _ in range(3):
            x = torch.sin(x * self.scale) * window
        return x


@pytest.mark.parametrize("policy", POLICIES)
def test_a_constant(policy: str) -> None:
    assert_equal_twins(Windowed, steps(lambda model, _: model(data(2, WIDTH)).square().mean()), policy)


def test_a_constant_costs_nothing_and_the_smallest_budget_is_met() -> None:
    def loss(output: torch.Tensor, _batch: object) -> torch.Tensor:
        return output.square().mean()

    with pytest.raises(BudgetTooSmall) as caught:
        gs.plan(Windowed(), data(2, WIDTH), loss=loss, budget=64 * 1024)  # 48 KiB are resident
    plan = gs.plan(Windowed(), data(2, WIDTH), loss=loss, budget=caught.value.minimum_bytes)
    assert plan.predicted_peak_bytes == caught.value.minimum_bytes
    region = plan.graph.regions[0]
    constants = [op for op in region.ops if op.view and not op.inputs]
    assert [region.storages[region.values[op.outputs[0]].storage].kind for op in constants] == [StorageKind.RESIDENT]
