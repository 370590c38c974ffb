"""Compiled code calls convolutions in layouts of its own choice: they are priced so, and so is what it saves."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradstow as gs
from gradstow._stow import plan_of
from gradstow.capture import _region
from gradstow.cost import measure_peak
from gradstow.execute import _program, _sources

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def net() -> nn.Module:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Conv2d(c, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for c in (3, 16, 16, 16))
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)).train()


def stowed(make: Callable[[], nn.Module], x: torch.Tensor, budget: int | str, **given: Any) -> nn.Module:
    """A model that has trained within the budget, or within the smallest one: convolutions need other memory on other
    processors."""
    for _ in range(6):
        model = gs.stow(make(), budget=budget, codegen="inductor", **given)
        try:
            model(x).sum().backward()
            model.zero_grad()
            break
        except gs.errors.BudgetTooSmall as refused:
            budget = refused.minimum_bytes
    return model


def train(model: nn.Module) -> int:
    """The peak of the second step."""
    for _ in range(2):
        with measure_peak("cpu") as memory:
            model(X).square().mean().backward()
        model.zero_grad()
    return memory.peak_bytes


@pytest.fixture
def priced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Signatures of calls that were priced only after compiling."""
    asked: list[str] = []
    measured = _sources.measured_costs

    def noted(signatures: Any, *args: Any) -> Any:
        asked.extend(signatures)
        return measured(signatures, *args)

    monkeypatch.setattr(_sources, "measured_costs", noted)
    return asked


def convolutions(signatures: Any) -> Iterator[list[torch.Tensor]]:
    """The tensors that each convolution but the first one is called with, without data."""
    for text in signatures:
        target, args, _ = json.loads(text)
        if "convolution" in target:
            found = [torch.empty_strided(*a["T"][:2], device="meta") for a in args if isinstance(a, dict)]
            if not any(t.shape[1:2] == (3,) for t in found):  # the batch stays as it came
                yield found


def channels_last(tensors: list[torch.Tensor]) -> bool:
    return all(t.is_contiguous(memory_format=torch.channels_last) for t in tensors if t.dim() == 4)


def test_convolutions_are_priced_as_they_will_be_called(priced: list[str]) -> None:
    model = stowed(net, X, "80%")
    peak = train(model)
    plan = plan_of(model)
    assert plan is not None
    assert plan.step_budget_bytes is not None
    assert peak <= plan.step_budget_bytes
    found = list(convolutions(plan.costs.costs))
    assert len(found) >= 2
    assert all(channels_last(tensors) for tensors in found)
    assert not list(convolutions(priced))


def test_a_call_that_was_priced_otherwise_is_priced_again(priced: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_region, "note_layouts", lambda _module: None)
    stowed(net, X, "80%")
    found = list(convolutions(priced))
    assert found
    assert all(channels_last(tensors) for tensors in found)


def test_what_is_saved_for_the_backward_is_not_copied_into_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    sources: list[str] = []
    compile_graph = _program.compile_graph

    def noted(*args: Any, **kwargs: Any) -> Any:
        made = compile_graph(*args, **kwargs)
        sources.append(made.source)
        return made

    monkeypatch.setattr(_program, "compile_graph", noted)
    stowed(net, X, "100%")
    assert len(sources) >= 2
    for source in sources:
        assert source.count("(8, 16, 32, 32), (16384, 1, 512, 16)") >= 4
        assert source.count("empty_strided_cpu((8, 16, 32, 32), (16384, 1024, 32, 1)") <= 1  # behind the last one


class TwoHeads(nn.Module):
    """The second head reads a view of what the first one makes convolutions of."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(1024, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.a(x).relu()
        return self.b(y).mean(), self.c(y.flatten(2)).sin().mean()


@pytest.mark.parametrize("used", [0, 1])
def test_a_head_without_a_gradient(used: int) -> None:
    torch.manual_seed(0)
    plain = TwoHeads().train()
    planned = gs.stow(copy.deepcopy(plain), budget="200%", codegen="inductor")
    plain(X)[used].backward()
    loss = planned(X)[used]
    with pytest.warns(UserWarning, match="got no gradient"):
        loss.backward()
    for (name, expected), found in zip(plain.named_parameters(), planned.parameters(), strict=True):
        assert (expected.grad is None) == (found.grad is None), name
        if expected.grad is not None and found.grad is not None:
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-6)


def test_convolutions_on_disk(tmp_path: Path) -> None:
    model = stowed(net, X, "90%", offload=f"disk:{tmp_path}")
    assert plan_of(model) is not None


class Attends(nn.Module):
    """Attention over what a convolution makes: library calls in layouts that nobody foresaw."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 3, padding=1), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.stem(x).relu()
        batch, width, high, wide = y.shape
        t = self.norm(y.flatten(2).transpose(1, 2))
        q, k, v = self.qkv(t).view(batch, high * wide, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        t = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, high * wide, width)
        return (y + self.out(t).transpose(1, 2).view(batch, width, high, wide)).sin().mean()


class Outside(nn.Module):
    """Returns what its loss is made of: grouped, dilated and transposed convolutions in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.g = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, groups=4, stride=2, padding=2, dilation=2)
        self.n, self.t = nn.BatchNorm2d(16), nn.ConvTranspose2d(32, 8, 3, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.t(self.g(self.n(self.a(x)).relu()).relu())


@pytest.mark.parametrize("kind", [Attends, Outside])
def test_the_smallest_budget_holds(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    x = X[:4, :, :16, :16].contiguous(memory_format=torch.channels_last)
    model = stowed(lambda: kind().train().to(memory_format=torch.channels_last), x, 1000)
    with measure_peak("cpu") as memory:
        model(x).sum().backward()
    plan = plan_of(model)
    assert plan is not None
    assert plan.step_budget_bytes is not None
    assert memory.peak_bytes <= plan.step_budget_bytes + 16  # the sum and its gradient are outside of the model
