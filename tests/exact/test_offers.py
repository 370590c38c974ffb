"""Where each action is offered, and where it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradstow as gs
from gradstow.actions import code_for, kept_as
from twins import data


class Sorted(torch.nn.Module):
    """A tower of ops that find indices, all of which the backward reads."""

    def __init__(self, how: str, width: int) -> None:
        super().__init__()
        self.how, self.linear = how, torch.nn.Linear(4, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        for scale in (1.1, 1.2, 1.3, 1.4):
            if self.how == "sort":
                y = y.sort(dim=-1)[0] * scale
            elif self.how == "max":
                y = y - y.max(dim=-1, keepdim=True)[0] * scale
            else:
                y = y.topk(y.shape[0] - 1, dim=0)[0] * scale
        return y.square().mean()


def reasons(how: str, width: int, rows: int) -> set[str]:
    """Why values are compressed, when compression is all that may be done."""
    model, batch = Sorted(how, width), data(rows, 4)
    stored = gs.plan(model, batch)
    plan = gs.plan(model, batch, budget=stored.predicted_peak_bytes - 1, actions=("store", "compress"))
    return {row.reason for row in plan.rows if row.decision == "compress"}


@pytest.mark.parametrize(("how", "width", "shown"), [("sort", 512, "64.0 KiB"), ("sort", 64, "4.0 KiB")])
def test_sorted_indices_are_narrow(how: str, width: int, shown: str) -> None:
    assert reasons(how, width, rows=64) == {f"kept as {shown}, exactly"}


def test_small_indices_and_unknown_ones_stay() -> None:
    with pytest.raises(gs.errors.BudgetTooSmall):
        reasons("max", 512, rows=16)  # 128 bytes are not worth an op


class Rectified(torch.nn.Module):
    """A ReLU whose result the next layer's gradient reads, and one whose result nobody else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(32, 64), torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(torch.relu(self.first(x)))).sum(-1).square().mean()


@pytest.mark.parametrize("code", ["bf16", "int8", "int4"])
def test_a_coded_relu_keeps_its_sign_exactly(code: str) -> None:
    plan = gs.plan(Rectified(), data(256, 32), policy={"relu": code})
    targets = [op.target for op in plan.graph.regions[0].ops if op.lazy]
    assert targets.count("gradstow.zero_by_bits.default") == 0, "the gradient itself is no encoding"
    assert "gradstow.above_bits.default" in targets
    assert any(code in row.reason or "as" in row.reason for row in plan.rows if row.decision == "compress")
    found = gs.verify(Rectified(), data(256, 32), plan=None, policy={"relu": code}, rounds=1)
    assert found.gradient_error < {"bf16": 0.01, "int8": 0.05, "int4": 0.5}[code]


def test_short_floats_gain_nothing_as_bf16() -> None:
    model = Rectified().to(torch.bfloat16)
    plan = gs.plan(model, data(256, 32).to(torch.bfloat16), policy={"relu": "bf16"})
    assert "2 of them have no such code" in str(plan)
    assert plan.lossy == {}


@pytest.mark.parametrize(("asked", "code"), [("int4", "int4"), (0.01, "int8"), (0.9, "int2")])
def test_a_code_by_its_name_or_its_error(asked: Any, code: str) -> None:
    assert code_for(asked) == code


@pytest.mark.parametrize("asked", ["int3", 0.0, 1.0, -0.5, True, None, float("nan")])
def test_no_code(asked: Any) -> None:
    with pytest.raises(gs.errors.PolicyError, match="is no code"):
        code_for(asked)


def test_an_error_that_no_code_keeps() -> None:
    with pytest.raises(gs.errors.PolicyError, match="closer than any code"):
        code_for(1e-5)


class Odd(torch.nn.Module):
    """Indices whose range nobody told us, a mask that is not its whole memory, a ReLU of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        least = (self.weight * 2).cummin(dim=0)[0]
        chosen = torch.where((x[:, :1] > 0).expand(64, 64), least, least * 3)
        return chosen.square().mean() + torch.nn.functional.threshold(self.weight, 0.0, 0.0).square().mean()


def test_what_is_not_understood_is_stored_and_equal() -> None:
    stored = gs.plan(Odd(), data(64, 64))
    with pytest.raises(gs.errors.BudgetTooSmall):
        gs.plan(Odd(), data(64, 64), budget=stored.predicted_peak_bytes - 1, actions=("store", "compress"))
    found = gs.verify(Odd(), data(64, 64), budget="100%", rounds=1)
    assert found.ok


def test_each_way_by_its_name() -> None:
    ops = frozenset({"aten.relu.default"})
    assert [type(kept_as(code, ops)).__name__ for code in ("sparse", "int8", "disk")] == ["Sparse", "Lossy", "Offload"]
