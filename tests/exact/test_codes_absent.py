"""Values that are kept as codes or elsewhere, where some gradients of a step never arrive."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import gradstow as gs
from gradstow._stow import plan_of


class Three(nn.Module):
    """Three losses, each with a mask, pooling indices and a ReLU of its own, all of the same sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [self.one(part, x) for part in self.parts]

    def one(self, part: nn.Module, x: torch.Tensor) -> torch.Tensor:
        dropped = nn.functional.dropout(part(x).relu(), 0.4)
        pooled = nn.functional.max_pool2d(dropped.view(-1, 1, 64, 64), 2)
        return pooled.square().sum()


RULES = {
    "exact": {"*": "compress"},
    "sparse": {"relu": "sparse", "*": "compress"},
    "disk": {"relu": "disk", "*": "compress"},
}


def step(model: nn.Module, which: tuple[int, ...]) -> list[torch.Tensor | None]:
    model.zero_grad()
    torch.manual_seed(1)
    losses = model(torch.randn(512, 64))
    torch.stack([losses[i] for i in which]).sum().backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("rules", list(RULES))
def test_each_value_is_found_by_what_it_is(rules: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    torch.manual_seed(0)
    plain = Three()
    model = gs.stow(copy.deepcopy(plain), policy=RULES[rules])
    for which in ((0, 1, 2), (1,), (2,), (0, 2), (1, 2), (0,)):
        found, expected = step(model, which), step(plain, which)
        assert sum(g is not None for g in expected) == 2 * len(which)
        for one, two in zip(found, expected, strict=True):
            assert (one is None) == (two is None)
            assert one is None or two is None or torch.equal(one, two)
    plan = plan_of(model)
    assert plan is not None
    assert any("unpack_bits" in op.name for region in plan.graph.regions for op in region.ops), "nothing was encoded"
