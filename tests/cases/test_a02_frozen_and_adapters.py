"""A2. Frozen first layer, LoRA: exactly what gets a gradient in plain training gets the same one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from twins import POLICIES, assert_equal_twins, data, steps


class Adapted(nn.Module):
    """A frozen linear layer with a rank-2 adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(16, 16), nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Adapters(nn.Module):
    def __init__(self, frozen: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16).requires_grad_(False)
        self.blocks = nn.ModuleList(Adapted() for _ in range(4))
        if frozen is not None:
            self.blocks[frozen].requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x


IDS = torch.arange(12).view(3, 4) % 20


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("frozen", [None, 1, 3])
def test_adapters_behind_frozen_layers(frozen: int | None, policy: str) -> None:
    model = assert_equal_twins(lambda: Adapters(frozen), steps(lambda m, _: m(IDS).square().mean()), policy)
    trained = {n for n, p in model.named_parameters() if p.grad is not None}
    assert trained == {n for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("policy", POLICIES)
def test_inputs_that_need_no_gradient(policy: str) -> None:
    assert_equal_twins(Adapted, steps(lambda m, step: m(data(4, 16, seed=step)).square().mean()), policy)


def test_unfreezing_after_two_steps() -> None:
    def thaw(model: nn.Module, step: int) -> None:
        if step == 2:
            model.blocks[1].requires_grad_(True)

    def use(model: nn.Module) -> object:
        return steps(lambda m, _: m(IDS).square().mean(), 4, thaw)(model)

    model = assert_equal_twins(lambda: Adapters(1), use)  # type: ignore[arg-type]
    assert model.blocks[1].base.weight.grad is not None
