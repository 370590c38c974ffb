"""Compiled code calls convolutions in layouts of its own choice: they are priced so, and so is what it saves."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
    """The tensors that each convolution is called with, without data."""
    for text in signatures:
        target, args, _ = json.loads(text)
        if "convolution" in target:
            yield [torch.empty_strided(*a["T"][:2], device="meta") for a in args if isinstance(a, dict)]


def channels_last(tensors: list[torch.Tensor]) -> bool:
    return all(t.is_contiguous(memory_format=torch.channels_last) for t in tensors if t.dim() == 4)


def test_convolutions_are_priced_as_they_will_be_called(priced: list[str]) -> None:
    model = gs.stow(net(), budget="80%", codegen="inductor")
    peak = train(model)
    plan = plan_of(model)
    assert plan is not None
    assert plan.step_budget_bytes is not None
    assert peak <= plan.step_budget_bytes
    found = list(convolutions(plan.costs.costs))
    assert len(found) >= 4
    assert all(channels_last(tensors) for tensors in found)
    assert not list(convolutions(priced))


def test_a_call_that_was_priced_otherwise_is_priced_again(priced: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_region, "note_layouts", lambda _module: None)
    train(gs.stow(net(), budget="80%", codegen="inductor"))
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
    train(gs.stow(net(), budget="100%", codegen="inductor"))
    assert len(sources) >= 2
    for source in sources:
        assert source.count("(8, 16, 32, 32), (16384, 1, 512, 16)") >= 4
        assert source.count("empty_strided_cpu((8, 16, 32, 32), (16384, 1024, 32, 1)") <= 1  # behind the last one
