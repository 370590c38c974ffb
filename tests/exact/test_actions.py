"""Lossless actions: what they put in is exact, fits only where it may, and is what the plan keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import gradstow as gs
from gradstow import _ops, _planning
from gradstow._stow import plan_of
from gradstow.cost import measure_peak
from gradstow.ir import CostTable
from twins import POLICIES, assert_equal_twins, data, steps

aten = torch.ops.aten
LAYOUTS = {
    "empty": torch.empty(0),
    "one": torch.randn(1),
    "odd": torch.randn(1001),
    "whole bytes": torch.randn(4, 8, 16),
    "transposed": torch.randn(6, 35).t(),
    "channels last": torch.randn(2, 5, 7, 9).to(memory_format=torch.channels_last),
    "several chunks": torch.randn((1 << 18) + 77),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_bools_come_back_from_bits(name: str) -> None:
    mask = LAYOUTS[name] > 0.3
    code = _ops.pack_bits(mask)
    again = _ops.unpack_bits(code, list(mask.shape), list(mask.stride()))
    assert code.numel() == -(-mask.numel() // 8)
    assert torch.equal(again, mask)
    assert again.stride() == mask.stride()


def test_bits_of_another_length_are_refused() -> None:
    code = torch.zeros(3, dtype=torch.uint8)
    with pytest.raises(ValueError, match="3 bytes of bits do not fit 8 elements"):
        _ops.unpack_bits(code, [8], [1])
    with pytest.raises(ValueError, match="3 bytes of bits do not fit 40 elements"):
        _ops.zero_by_bits(torch.ones(40), code)


def test_bits_under_fake_tensors_leave_nothing_behind() -> None:
    _ops._spread.cache_clear()
    with FakeTensorMode():
        fake = torch.empty(17, dtype=torch.bool)
        code = _ops.pack_bits(fake)
        assert (code.shape, code.dtype) == ((3,), torch.uint8)
        assert _ops.unpack_bits(code, [17], [1]).shape == (17,)
        assert _ops.zero_by_bits(torch.empty(17), code).shape == (17,)
    mask = torch.rand(17) > 0.5
    assert torch.equal(_ops.unpack_bits(_ops.pack_bits(mask), [17], [1]), mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LAYOUTS)
def test_relus_gradient_from_bits_is_relus_own(name: str, dtype: torch.dtype) -> None:
    x = LAYOUTS[name].to(dtype).clone(memory_format=torch.preserve_format)
    special = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0], dtype=dtype)
    x.as_strided((min(5, x.numel()),), (1,)).copy_(special[: x.numel()])
    gradient = torch.randn_like(x)
    expected = aten.threshold_backward(gradient, x, 0.0)
    code = _ops.above_bits(x, 0.0)
    for got in (_ops.zero_by_bits(gradient, code), _ops.zero_by_bits_(gradient.clone(), code)):
        assert torch.equal(got, expected)
        assert got.stride() == expected.stride()


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("size", [(2, 3, 13, 17), (3, 13, 17), (1, 4, 8, 8)])
def test_max_poolings_gradient_needs_only_sizes(size: tuple[int, ...], ceil_mode: bool) -> None:
    x = torch.randn(size)
    out, indices = aten.max_pool2d_with_indices(x, [3, 2], [2, 1], [1, 0], [1, 2], ceil_mode)
    gradient = torch.randn_like(out)
    rest = ([3, 2], [2, 1], [1, 0], [1, 2], ceil_mode)
    expected = aten.max_pool2d_with_indices_backward(gradient, x, *rest, indices)
    got = _ops.max_pool_backward(gradient, indices, list(size), *rest)
    assert torch.equal(got, expected)
    assert got.stride() == expected.stride()


class Pooled(torch.nn.Module):
    """Convolution, ReLU and max-pooling in a row, then dropout: every action fits somewhere."""

    def __init__(self, *, shared: bool = False) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList(torch.nn.Conv2d(i, 16, 3, padding=1) for i in (3, 16))
        self.drop, self.head, self.shared = torch.nn.Dropout(0.3), torch.nn.Linear(16 * 8 * 8, 10), shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        extra = x.new_zeros(())
        for conv in self.convs:
            x = torch.relu(conv(x))
            if self.shared:
                extra = extra + x.square().mean()
            x = torch.nn.functional.max_pool2d(x, 2)
        return self.head(self.drop(x.flatten(1))) + extra


class Chosen(torch.nn.Module):
    """Indices and conditions that the backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x.flatten(2).transpose(1, 2)).transpose(1, 2)
        best, _ = y.topk(600, dim=-1)
        return torch.where(y > y.mean(), y, y * 0.5).square().mean() + best.sum()


MAKERS: dict[str, Callable[[], torch.nn.Module]] = {
    "pooled": Pooled,
    "ReLU with another reader": lambda: Pooled(shared=True),
    "channels last": lambda: Pooled().to(memory_format=torch.channels_last),
    "bf16": lambda: Pooled().to(torch.bfloat16),
    "chosen": Chosen,
}


@pytest.mark.parametrize("policy", ["store-all", *POLICIES])
@pytest.mark.parametrize("name", MAKERS)
def test_equal_to_plain(name: str, policy: str) -> None:
    def loss(model: torch.nn.Module, step: int) -> torch.Tensor:
        x = data(4, 3, 32, 32, seed=step).to(next(model.parameters()).dtype)
        return model(x.to(memory_format=torch.channels_last) if "last" in name else x).square().mean()

    stowed = assert_equal_twins(MAKERS[name], steps(loss), policy)
    plan = plan_of(stowed)
    assert plan is not None
    assert policy == "tight" or not any(op.lazy for op in plan.graph.regions[0].ops)


def kept(plan: gs.Plan) -> dict[str, int]:
    """Bytes that cross to the backward, by the op that makes them."""
    region, schedule = plan.graph.regions[0], plan.schedule.regions[0]
    makers = {region.values[v].storage: op.target for op in region.ops if not op.backward for v in op.outputs[::-1]}
    found: dict[str, int] = {}
    for s in schedule.kept:
        found[makers[s]] = found.get(makers[s], 0) + region.storages[s].nbytes
    return found


def test_what_is_kept_without_any_recomputation() -> None:
    model = Pooled().train()
    plan = compressed(model, actions=("store", "compress"))
    first, second = 4 * 16 * 32 * 32, 4 * 16 * 16 * 16
    found = kept(plan)
    assert plan.rerun_ops == 0
    assert found["gradstow.above_bits.default"] == (first + second) // 8
    assert found["aten._to_copy.default"] == 2 * first // 4 + second // 4  # of one in four: below 1024, and below 256
    assert found["gradstow.pack_bits.default"] == second // 4 // 8
    assert "aten.relu.default" not in found
    assert plan.predicted_step_peak_bytes < 0.8 * plan.plain_step_peak_bytes
    rows = {row.op: row for row in plan.rows if row.decision == "compress"}
    assert rows.keys() == {"relu", "max_pool2d_with_indices", "keep_mask"}
    assert rows["keep_mask"].reason == f"kept as {second // 4 // 8} B, exactly"


def compressed(model: torch.nn.Module, **options: Any) -> gs.Plan:
    """A plan for less than everything stored as it is, so that compression is tried."""
    batch = torch.zeros(4, 3, 32, 32)

    def loss(out: torch.Tensor, _batch: Any) -> torch.Tensor:
        return out.square().mean()

    stored = gs.plan(model, batch, loss=loss)
    assert not any(op.lazy for op in stored.graph.regions[0].ops)
    return gs.plan(model, batch, loss=loss, budget=stored.predicted_peak_bytes - 1, **options)


def test_encoding_runs_only_for_what_is_kept() -> None:
    model = Pooled().train()
    plan = compressed(model)
    region, schedule = plan.graph.regions[0], plan.schedule.regions[0]
    lazy = {i for i, op in enumerate(region.ops) if op.lazy}
    ran = {e.op for e in schedule.forward if getattr(e, "op", -1) in lazy}
    made = {region.values[v].storage for i in ran for v in region.ops[i].outputs}
    assert made <= set(schedule.kept)
    plain = {e.op for e in plan.plain.regions[0].forward if getattr(e, "op", -1) in lazy}
    assert plain == set(), "plain PyTorch has none of them"


class Tower(torch.nn.Module):
    """Convolutions and ReLUs without normalisation: the backward needs ReLU outputs alone, and half of one is zero."""

    def __init__(self, bias: float = 0.0) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList(torch.nn.Conv2d(i, 24, 3, padding=1) for i in (3, *[24] * 7))
        for conv in self.convs:
            torch.nn.init.constant_(conv.bias, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv in self.convs:
            x = torch.relu_(conv(x))
        return x.square().mean()


def images(step: int) -> torch.Tensor:
    return data(8, 3, 80, 80, seed=step)


@pytest.mark.filterwarnings("ignore:gradstow", "ignore:a ReLU's output")
@pytest.mark.parametrize("bias", [0.0, 9.0], ids=["half zero", "hardly any zero"])
def test_sparse_codes_are_exact_and_keep_their_bytes(bias: float) -> None:
    model = assert_equal_twins(lambda: Tower(bias), steps(lambda m, step: m(images(step))), {"relu": "sparse"})
    plan = plan_of(model)
    assert plan is not None
    rows = [row for row in plan.rows if row.op == "relu"]
    assert [row.decision for row in rows] == ["compress"] * 8
    assert "numbers that are not zero, and a bit for each" in rows[0].reason
    assert plan.saved_bytes < 0.7 * plan.plain_saved_bytes
    assert plan.lossy == {}
    batch = images(0)
    model.zero_grad()
    with measure_peak("cpu") as memory:
        model(batch).backward()
    assert memory.peak_bytes <= plan.predicted_step_peak_bytes


@pytest.mark.filterwarnings("ignore:a ReLU's output")
def test_a_budget_takes_sparse_codes_where_they_take_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = _planning.measured_costs

    def slow_convolutions(*args: Any, **kwargs: Any) -> CostTable:
        table = measured(*args, **kwargs)
        costs = {t: replace(c, seconds=1.0 if "aten.convolution" in t else 1e-2) for t, c in table.costs.items()}
        return replace(table, costs=costs)

    monkeypatch.setattr(_planning, "measured_costs", slow_convolutions)
    model, batch = Tower(), images(0)
    bare = gs.plan(model, batch, budget="85%", actions=("store", "recompute"))
    plan = gs.plan(model, batch, budget=bare.predicted_peak_bytes)
    assert plan.predicted_seconds < bare.predicted_seconds - 0.9
    assert [row.op for row in plan.rows if "for each" in row.reason] != []
    assert gs.verify(model, batch, plan=plan, rounds=1).ok


def test_sparse_codes_where_compressing_is_not_allowed() -> None:
    with pytest.raises(gs.errors.PolicyError, match="compress"):
        gs.plan(Tower(), images(0), policy={"relu": "sparse"}, actions=("store", "recompute"))
