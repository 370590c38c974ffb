"""Autocast, float32 where it matters, and torch's GradScaler: one unscaling, one step, one update per window."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradstow as gs
from equality import differences, state
from gradstow.train._precision import Precision
from gradstow.train._step import TrainStep

SHORT = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Net(nn.Module):
    """Every kind of normalisation; notes the dtype that each one gives, and what it saved for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.batch, self.group, self.instance = nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True)
        self.layer, self.head = nn.LayerNorm(8), nn.Linear(8, 5)
        self.saved: dict[str, list[torch.dtype]] = {}

    def note(self, name: str, y: torch.Tensor) -> torch.Tensor:
        node: Any = y.grad_fn
        statistics = [getattr(node, n, None) for n in ("_saved_result1", "_saved_result2")]
        self.saved[name] = [t.dtype for t in statistics if isinstance(t, torch.Tensor)]
        return y

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        x = self.conv(x)
        x = self.note("batch", self.batch(x))
        x = self.instance(self.note("group", self.group(x))).relu().mean((2, 3))
        logits = self.head(self.note("layer", self.layer(x)))
        return {"logits": logits, "inner": (logits, [x])}


def batch_of(count: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 3, 8, 8), torch.randint(0, 5, (count,))


def loss_of(output: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output["logits"], batch[1])


def step_of(model: nn.Module, lr: float = 0.1, **options: Any) -> TrainStep:
    return TrainStep(model, torch.optim.SGD(model.parameters(), lr, momentum=0.9), loss=loss_of, **options)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_the_forward_is_short_and_statistics_and_loss_are_float32(name: str) -> None:
    torch.manual_seed(0)
    model, seen = Net(), {}

    def loss(output: Any, batch: Any) -> torch.Tensor:
        seen["logits"] = output["logits"].dtype, output["inner"][0].dtype, output["inner"][1][0].dtype
        seen["autocast"] = torch.is_autocast_enabled("cpu")
        seen["head"] = model.head.weight.dtype
        found = loss_of(output, batch)
        seen["loss"] = found.dtype
        return found

    model.head.register_forward_hook(lambda _m, _i, output: seen.update(raw=output.dtype))
    scaler = {"init_scale": 256.0} if name == "fp16" else None  # at torch's own this net's first step overflows
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    result = TrainStep(model, optimizer, loss=loss, precision=name, scaler=scaler)(batch_of())
    assert result.skipped is None
    assert seen["raw"] == SHORT[name]
    assert seen["logits"] == (torch.float32,) * 3
    assert seen["loss"] == seen["head"] == torch.float32
    assert not seen["autocast"]
    assert model.saved == {kind: [torch.float32] * 2 for kind in ("batch", "group", "layer")}
    assert model.batch.running_mean.dtype == torch.float32
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_short_steps_are_a_hand_written_loops(name: str) -> None:
    torch.manual_seed(0)
    model, batches = Net(), [batch_of() for _ in range(3)]
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), 0.1, momentum=0.9)
    settings = {"init_scale": 256.0} if name == "fp16" else None
    scaler = torch.amp.GradScaler("cpu", enabled=name == "fp16", **(settings or {}))
    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", SHORT[name]):
            output = twin(batch[0])
        loss = F.cross_entropy(output["logits"].float(), batch[1])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    step = step_of(model, precision=name, scaler=settings)
    results = [step(batch) for batch in batches]
    assert differences(state(twin, "the end"), state(model, "the end")) == []
    assert differences([*twin.named_parameters()], [*model.named_parameters()]) == []
    assert results[-1].loss == loss.item()


def test_gradients_of_small_losses_survive_fp16_only_when_scaled() -> None:
    torch.manual_seed(0)
    model, batch = Net(), batch_of()
    bare = copy.deepcopy(model)

    def tiny(output: Any, batch: Any) -> torch.Tensor:
        return loss_of(output, batch) * 1e-7

    def norm(model: nn.Module, scale: float) -> torch.Tensor:
        options = {"precision": "fp16", "scaler": {"init_scale": scale}}
        TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss=tiny, **options)(batch)
        assert model.conv.weight.grad is not None
        return model.conv.weight.grad.norm()

    whole = copy.deepcopy(model)
    TrainStep(whole, torch.optim.SGD(whole.parameters(), 0.1), loss=tiny)(batch)
    exact = whole.conv.weight.grad.norm()
    assert abs(norm(model, 2.0**16) / exact - 1) < 0.05
    assert abs(norm(bare, 1.0) / exact - 1) > 0.2


def test_the_scale_grows_and_every_setting_is_open() -> None:
    torch.manual_seed(0)
    step = step_of(Net(), precision="fp16")
    assert step.scaler.state_dict() == torch.amp.GradScaler("cpu").state_dict()
    settings = {"init_scale": 8.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2}
    step = step_of(Net(), precision="fp16", scaler=settings)
    scales = [step(batch_of()) and step.scaler.get_scale() for _ in range(4)]
    assert scales == [8.0, 32.0, 32.0, 128.0]
    own = torch.amp.GradScaler("cpu", init_scale=4.0)
    assert step_of(Net(), precision="fp16", scaler=own).scaler is own
    assert step_of(Net(), scaler=torch.amp.GradScaler("cpu", enabled=False)).scaler is None


def test_a_planned_step_in_bf16_is_the_plain_one() -> None:
    torch.manual_seed(0)
    model, batch = Net(), batch_of()
    model.note = lambda _name, y: y  # type: ignore[method-assign]
    twin = copy.deepcopy(model)
    plain, planned = step_of(twin, precision="bf16"), step_of(model, precision="bf16", budget="100%")
    for _ in range(2):
        plain(batch)
        planned(batch)
    assert differences(state(twin, "the end"), state(model, "the end")) == []


def test_a_loss_of_the_models_own() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layer(x).square().mean()}

    model = Own()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), precision="bf16", micro_batch=3)
    assert step({"x": torch.randn(5, 4)}).skipped is None


def test_sparse_gradients_are_scaled_added_up_and_clipped_as_dense_ones() -> None:
    class Bag(nn.Module):
        def __init__(self, sparse: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head = nn.Embedding(50, 8, sparse=sparse), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": self.head(self.embed(x).mean(1))}

    batch = torch.randint(0, 9, (7, 6)), torch.randint(0, 4, (7,))  # indices repeat
    found = []
    for sparse in (False, True):
        model = Bag(sparse)
        optimizers = [torch.optim.SGD(model.embed.parameters(), 0.5), torch.optim.SGD(model.head.parameters(), 0.5)]
        step = TrainStep(model, optimizers, loss=loss_of, precision="fp16", clip=0.01, micro_batch=4)
        results = [step(batch) for _ in range(3)]
        assert [r.skipped for r in results] == [None] * 3
        assert model.embed.weight.grad.is_sparse == sparse
        found.append(([r.grad_norm for r in results], model.embed.weight.detach(), model.head.weight.detach()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for dense, other in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(dense, other, rtol=1e-6, atol=1e-7)


def test_contradictions_are_named() -> None:
    with pytest.raises(gs.errors.GradstowError, match="'fp8' is not known. Give one of fp32, bf16, fp16"):
        step_of(Net(), precision="fp8")
    with pytest.raises(gs.errors.GradstowError, match="need no scaling"):
        step_of(Net(), precision="bf16", scaler={"init_scale": 2.0})
    with pytest.raises(gs.errors.GradstowError, match="init_scal.*It takes init_scale"):
        step_of(Net(), precision="fp16", scaler={"init_scal": 2.0})
    model = Net()
    with pytest.raises(gs.errors.GradstowError, match="LBFGS runs the forward several times"):
        TrainStep(model, torch.optim.LBFGS(model.parameters()), loss=loss_of)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(gs.errors.GradstowError, match="ReduceLROnPlateau needs a figure of your own"):
        TrainStep(model, optimizer, loss=loss_of, scheduler=plateau)
    assert Precision.of(Precision("bf16")).dtype == torch.bfloat16
