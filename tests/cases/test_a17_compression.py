"""A17: what compression may change, and what it never touches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradstow as gs
from gradstow import _lossy
from gradstow._codes import CODES
from gradstow._stow import plan_of
from gradstow.ir import StorageKind
from twins import POLICIES, assert_equal_twins, data, steps


class Everything(torch.nn.Module):
    """An embedding, max-pooling, a mask, normalisation, a transposed convolution, softmax and complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16)
        self.conv, self.back = torch.nn.Conv2d(16, 16, 3, padding=1), torch.nn.ConvTranspose2d(16, 16, 2, stride=2)
        self.norm, self.drop = torch.nn.BatchNorm2d(16), torch.nn.Dropout(0.2)
        self.head = torch.nn.Linear(16, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens).permute(0, 3, 1, 2)
        x = torch.nn.functional.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)
        x = torch.where(x > 0.1, self.back(self.drop(x)).mean((2, 3), keepdim=True), x)
        x = torch.fft.ifft(torch.fft.fft(x) * 2j).imag
        return self.head(x.permute(0, 2, 3, 1)).softmax(-1) * x.permute(0, 2, 3, 1)


def loss(model: torch.nn.Module, step: int) -> torch.Tensor:
    tokens = (data(4, 16, 16, seed=step) * 10).long() % 50
    return model(tokens).square().mean()


@pytest.mark.parametrize("policy", ["store-all", "relu=compress,dropout=compress,maxpool=compress", *POLICIES])
def test_exact_codes_are_equal_to_plain(policy: str) -> None:
    assert_equal_twins(Everything, steps(loss), policy)


def trained(policy: str, count: int = 2) -> tuple[torch.nn.Module, list[torch.Tensor], gs.Plan]:
    torch.manual_seed(0)
    _lossy.seed(0)
    model = gs.stow(Everything().train(), policy=policy)
    seen = []
    for step in range(count):
        torch.manual_seed(step)
        model.zero_grad()
        value = loss(model, step)
        value.backward()
        seen += [value.detach(), torch.get_rng_state(), *(p.grad for p in model.parameters() if p.grad is not None)]
    plan = plan_of(model)
    assert plan is not None
    return model, [t.clone() for t in seen], plan


@pytest.mark.parametrize("code", CODES)
def test_lossy_codes_hold_only_what_they_may(code: str) -> None:
    _, _, plan = trained(f"*={code}")
    region = plan.graph.regions[0]
    coded = [op for op in region.ops if op.rerun is not None and op.rerun.code]
    assert {op.target for op in coded} >= {"aten.convolution.default", "aten.relu.default", "aten._softmax.default"}
    for op in coded:
        value = region.values[op.outputs[0]]
        assert value.dtype == "float32"
        assert region.storages[value.storage].kind is StorageKind.ACTIVATION
        assert op.rerun is not None
        assert op.rerun.outputs == op.outputs[:1], "statistics, indices and masks stay what they are"
    assert plan.lossy == {code: len(coded)} or sum(plan.lossy.values()) <= len(coded)
    assert "not exact" in str(plan)


@pytest.mark.parametrize("code", CODES)
def test_lossy_training_is_deterministic_and_leaves_the_users_streams(code: str) -> None:
    _, plain, _ = trained("store-all")
    _, got, _ = trained(f"*={code}")
    _, again, _ = trained(f"*={code}")
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    for a, b in zip(plain, got, strict=True):
        if a.dtype == torch.uint8 or a.dim() == 0:
            assert torch.equal(a, b), "the forward and the random streams are plain PyTorch's own"
        assert bool(b.isfinite().all())


def test_more_bits_are_nearer() -> None:
    _, plain, _ = trained("store-all")

    def error(code: str) -> float:
        _, got, _ = trained(f"*={code}")
        pairs = [(a, b) for a, b in zip(plain, got, strict=True) if a.dtype != torch.uint8 and a.dim() > 0]
        return sum(float((b - a).square().sum()) for a, b in pairs) ** 0.5

    errors = [error(code) for code in ("int8", "int4", "int2")]
    assert 0 < 5 * errors[0] < errors[1] < errors[2]
    assert error("bf16") < errors[0]


@pytest.mark.parametrize("code", CODES)
def test_inf_and_nan_reach_the_gradients_as_in_plain_pytorch(code: str) -> None:
    def gradients(policy: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64), torch.nn.Tanh()).train()
        gs.stow(model, policy=policy)
        x = data(32, 64)
        x[3, 5], x[7, 1] = float("nan"), float("inf")
        model(x).sum().backward()
        return [p.grad.isfinite() for p in model.parameters() if p.grad is not None]

    found = zip(gradients("store-all"), gradients(f"*={code}"), strict=True)
    assert all(torch.equal(a, b) for a, b in found)


@pytest.mark.parametrize("wrong", ["int3", "INT4", 0.0001, -0.1, 2.5, float("nan"), 1, True, "0.5"])
def test_unknown_codes_are_refused(wrong: Any) -> None:
    with pytest.raises(gs.errors.PolicyError, match="lossy="):
        gs.stow(torch.nn.Linear(3, 3), "50%", lossy=wrong)
    with pytest.raises(gs.errors.PolicyError, match="'sqrt' only stores and recomputes, and lossy= would change"):
        gs.stow(torch.nn.Linear(3, 3), policy="sqrt", lossy="int8")


@pytest.mark.parametrize(("error", "code"), [(0.4, "int2"), (0.1, "int4"), (0.01, "int8")])
def test_an_error_chooses_the_shortest_code_within_it(error: float, code: str) -> None:
    from gradstow.actions import code_for

    assert code_for(error) == code
    assert CODES[code].bound <= error


def test_the_table_names_what_is_kept() -> None:
    """A ReLU's bits beside its code, exact indices, and the code of a float."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.Tanh())
    plan = gs.plan(model.train(), data(128, 64), loss=lambda out, _: out.square().mean(), policy="*=int4")
    row = next(row for row in plan.rows if row.op == "relu")
    assert "int4, error at most 1/15" in row.reason
    assert "1.0 KiB, exactly" in row.reason
    _, _, everything = trained("*=int4")
    indices = [row for row in everything.rows if row.dtype == "int64" and row.decision == "compress"]
    assert indices
    assert all(row.reason.endswith("exactly") for row in indices)


def test_rules_that_compress_need_the_action() -> None:
    with pytest.raises(gs.errors.PolicyError, match="leaves that out"):
        gs.stow(torch.nn.Linear(3, 3), policy="*=int8", actions=("store", "recompute"))
    with pytest.raises(gs.errors.PolicyError, match=r"As a rule for everything it is ..=int8"):
        gs.stow(torch.nn.Linear(3, 3), policy="int8")
