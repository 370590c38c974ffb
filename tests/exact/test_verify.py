"""``gs.verify`` says equal only where it compared and found nothing; faults are named."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
from torch import nn

import gradstow as gs
from equality import differences, state
from gradstow._verify import compare, digest
from gradstow.capture import OutputRef
from gradstow.capture._rerun import RerunCall
from models import CASES, Case, rows, squares

pytestmark = pytest.mark.usefixtures("guessed_costs")

CONV = CASES["conv"]


def verified(case: Case, device: str, **options: Any) -> Any:
    model, batch = case.model(device), case.data(device)
    options = {"policy": "recompute-all", "steps": 2, "rounds": 1} | options
    return gs.verify(model, batch, loss=case.loss, **options)


@pytest.mark.parametrize("name", ["conv", "reused", "outputs", "conv-frozen"])
def test_good_models_are_equal(name: str, device: str) -> None:
    result = verified(CASES[name], device)
    assert (result.equal, result.inconclusive, result.differences) == (True, False, ())
    assert result.compared > 10
    assert result.ok
    assert "equal to plain PyTorch" in str(result)
    assert result.to_json()["ok"] is True


def test_the_users_model_is_untouched(device: str) -> None:
    model, batch = CONV.model(device), CONV.data(device)
    before = [(n, t.clone()) for n, t in model.state_dict().items()] + state(model, "before")
    gs.verify(model, batch, loss=CONV.loss, policy="recompute-all", steps=1, rounds=1)
    after = [(n, t.clone()) for n, t in model.state_dict().items()] + state(model, "before")
    assert differences(before, after) == []


def test_a_wrong_rerun_is_named(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradstow.capture import _region

    real = _region.rerun_call

    def wrong(node: Any, decode: Any = None) -> Any:
        """BatchNorm made again with another scale, or on CUDA with another epsilon."""
        call = real(node, decode)
        if call is None:
            return None
        last = OutputRef(1) if isinstance(call.args[-1], OutputRef) else 1.0
        return RerunCall(call.target, (*call.args[:-1], last), call.outputs)

    monkeypatch.setattr(_region, "rerun_call", wrong)
    result = verified(CONV, device)
    assert not result.equal
    assert not result.ok
    assert not result.inconclusive
    assert "gradient of features.0.weight in step 0" in result.differences
    assert "loss of step 0" not in result.differences  # the forward was right
    assert "DIFFERENT" in str(result)
    assert "differs: gradient of" in str(result)


class Unsteady(nn.Module):
    """A forward that differs from call to call."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(16, 4), kind
        self.count = [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "random":
            return self.layer(x.exp() * random.random())
        return self.layer(x.exp() * unsteady(self.count))

    def __deepcopy__(self, memo: Any) -> Unsteady:
        twin = Unsteady(self.kind)
        twin.load_state_dict(self.state_dict())
        twin.layer = twin.layer.to(next(self.parameters()).device)
        twin.count = self.count  # shared, as a global counter would be
        return twin


@torch._dynamo.disable
def unsteady(count: list[int]) -> float:
    count[0] += 1
    return float(count[0])


def test_pythons_random_starts_the_same_in_each_run(device: str) -> None:
    with contextlib.suppress(gs.errors.GradstowError):  # refused by name is as good
        assert verified(Case(lambda: Unsteady("random"), rows(), squares), device).ok


def test_a_model_that_differs_from_itself_never_passes(device: str) -> None:
    case = Case(lambda: Unsteady("counter"), rows(), squares)
    try:
        result = verified(case, device)
    except gs.errors.GradstowError:
        return  # refused by name is as good
    assert result.inconclusive or not result.equal
    assert not result.ok
    assert "equal to plain PyTorch (" not in str(result)


def test_comparing_nothing_is_a_failure() -> None:
    assert compare([], []) == ("nothing was compared",)
    assert compare([("a", "None")], [("a", "None")]) == ("nothing was compared",)
    assert compare([("a", "1")], [("b", "1")]) == ("the compared names differ",)
    assert compare([("a", "1"), ("b", "2")], [("a", "1"), ("b", "3")]) == ("b",)


def test_digest_agrees_with_equal() -> None:
    value = torch.tensor([1.0, -0.0, float("nan")])
    assert digest(value) == digest(torch.tensor([1.0, 0.0, float("nan")]))
    assert digest(value) != digest(torch.tensor([1.0, 0.0, float("inf")]))
    assert digest(value) != digest(value.double())
    assert digest(value) != digest(value[None])
    assert digest(value) != digest(None)
    assert digest(value.t() if value.ndim == 2 else value[:2]) != digest(value)
    complex_value = torch.complex(torch.ones(2), torch.zeros(2))
    assert digest(complex_value) == digest(complex_value.clone()) != digest(complex_value.conj() * 1j)
