"""A window of micro-batches gives the unsplit batch's gradient and loss; one micro-batch gives a plain loop's bits."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradstow as gs
from equality import differences, plain_copy, state
from gradstow.train._step import TrainStep
from gradstow.train._window import size_of, split, take
from models import Transformer

Tensor = torch.Tensor
Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Data:
    x: Tensor
    names: list[str]
    scale: float = 2.0


class Plain(nn.Module):
    """Convolutions without BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.ReLU())
        self.head = nn.Linear(8 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))


class Deep(nn.Module):
    """Enough activations that a budget has something to leave out."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(3) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.GELU())]
        self.body, self.head = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers), nn.Linear(8 * 64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))


def images(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, 8, 8), torch.randint(0, 5, (count,))


def tokens(count: int) -> dict[str, Tensor]:
    """Rows with other numbers of valid labels; in the first there are none."""
    x = torch.randint(0, 29, (count, 12))
    y = torch.roll(x, -1, 1)
    y[torch.arange(12) >= (torch.arange(count) * 5 % 12)[:, None]] = -100
    return {"x": x, "y": y}


def image_loss(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch[1])


def token_loss(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """NaN where there are no valid labels."""
    return F.cross_entropy(output.flatten(0, 1), batch["y"].flatten()), (batch["y"] != -100).sum()


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], Callable[..., Any]]] = {
    "cnn": (Plain, images, image_loss),
    "gpt": (lambda: Transformer(p=0.0), tokens, token_loss),
}


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def one_step(model: nn.Module, loss: Any, **options: Any) -> TrainStep:
    forward = (lambda m, b: m(b["x"])) if loss is token_loss else None
    return TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss=loss, forward=forward, **options)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("k", range(1, 17))
def test_k_micro_batches_are_one_batch(k: int, kind: str) -> None:
    make, data, loss = KINDS[kind]
    torch.manual_seed(k)
    size = 3
    model, batch = make(), data(max(2, size * k - k % 3))  # the last one has 3, 2 or 1
    whole = copy.deepcopy(model)
    expected = one_step(whole, loss)(batch)
    result = one_step(model, loss, micro_batch=size)(batch)
    assert (expected.micro_batches, result.micro_batches) == (1, k)
    apart = (gradients(model) - gradients(whole)).norm() / gradients(whole).norm()
    assert apart <= 1e-6
    assert result.loss == pytest.approx(expected.loss, rel=1e-6)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-6)


def test_the_comparison_sees_a_mean_of_means() -> None:
    torch.manual_seed(0)
    model, batch = Transformer(p=0.0), tokens(6)
    whole = copy.deepcopy(model)
    one_step(whole, token_loss)(batch)
    step = TrainStep(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        loss=lambda o, b: token_loss(o, b)[0].nan_to_num(),
        forward=lambda m, b: m(b["x"]),
        micro_batch=2,
    )
    with pytest.warns(UserWarning, match="-100"):
        step(batch)
    assert (gradients(model) - gradients(whole)).norm() / gradients(whole).norm() > 1e-2


@pytest.mark.parametrize("budget", [None, "90%"])
def test_one_micro_batch_is_a_plain_loop_bit_for_bit(budget: str | None) -> None:
    def make() -> nn.Module:
        parts = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(288, 5)]
        return nn.Sequential(*parts)

    torch.manual_seed(0)
    model, batches = make(), [images(8) for _ in range(3)]
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (model, twin)]
    rates = [torch.optim.lr_scheduler.StepLR(o, 2) for o in optimizers]
    losses = []
    torch.manual_seed(1)
    for batch in batches:
        optimizers[1].zero_grad(set_to_none=True)
        loss = image_loss(twin(batch[0]), batch)
        loss.backward()
        optimizers[1].step()
        rates[1].step()
        losses.append(loss.item())
    expected = [*state(twin, "the end"), *twin.state_dict().items()]
    torch.manual_seed(1)
    step = TrainStep(model, optimizers[0], loss=image_loss, budget=budget, scheduler=rates[0])
    results = [step(batch) for batch in batches]
    assert differences(expected, [*state(model, "the end"), *model.state_dict().items()]) == []
    assert [r.loss for r in results] == losses
    assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]
    assert (results[-1].peak_bytes is None) == (budget is None)


def test_micro_batches_under_a_budget() -> None:
    torch.manual_seed(0)
    model, batch = Deep(), images(11)
    twin = plain_copy(model)
    plain, stowed = one_step(twin, image_loss, micro_batch=4), one_step(model, image_loss, micro_batch=4, budget="75%")
    for _ in range(3):
        plain(batch)
        result = stowed(batch)
    assert result.micro_batches == 3
    assert differences(state(twin, "the end"), state(model, "the end")) == []


def test_auto_chooses_once_and_trains_as_the_whole_batch() -> None:
    torch.manual_seed(0)
    model, batch = Deep(), images(16)
    whole = copy.deepcopy(model)
    step = one_step(model, image_loss, micro_batch="auto", budget="45%", batch_size=16)
    assert step.choice is None
    result = step(batch)
    one_step(whole, image_loss)(batch)
    assert step.choice is not None
    assert step.micro_batch == step.choice.micro_batch
    assert result.micro_batches == step.choice.micro_batches
    assert f"{step.micro_batch} of 16" in str(step.choice)
    assert (gradients(model) - gradients(whole)).norm() / gradients(whole).norm() <= 1e-6
    with pytest.raises(gs.errors.GradstowError, match="within a budget, and none was given"):
        one_step(whole, image_loss, micro_batch="auto")


def test_your_own_parts_are_weighted_too() -> None:
    torch.manual_seed(0)
    model, batch = Transformer(p=0.0), tokens(15)
    whole = copy.deepcopy(model)
    one_step(whole, token_loss)(batch)
    parts = [{n: t[a:b] for n, t in batch.items()} for a, b in ((0, 2), (2, 12), (12, 15))]
    assert one_step(model, token_loss).window(parts).micro_batches == 3
    assert (gradients(model) - gradients(whole)).norm() / gradients(whole).norm() <= 1e-6
    with pytest.raises(gs.errors.GradstowError, match="without a micro-batch"):
        one_step(model, token_loss).window([])


def weighted(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """A mean over as many items of each sample as the batch says."""
    losses, counts = output.square().mean(1), batch[1]
    return (losses * counts).sum() / counts.sum(), counts.sum()


RAGGED = [[1, 500, 500, 500], [1, 3, 10, 30, 100, 300, 1000], [900, 1, 1, 40], [0, 2, 0, 7000]]


@pytest.mark.parametrize("counts", RAGGED)
def test_ragged_counts_are_exact_and_no_part_weighs_more_than_its_share(counts: list[int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    batch = torch.randn(len(counts), 4), torch.tensor(counts)
    scales = [nn.Parameter(torch.ones(())) for _ in range(2)]  # the loss's own
    whole, weights = copy.deepcopy(model), []

    def trained(model: nn.Module, scale: nn.Parameter, **options: Any) -> Any:
        def loss(output: Tensor, batch: Any) -> Any:
            mean, count = weighted(output * scale, batch)
            mean.register_hook(lambda gradient: weights.append(float(gradient)))
            return mean, count

        optimizer = torch.optim.SGD([*model.parameters(), scale], 0.1)
        return TrainStep(model, optimizer, loss=loss, **options)(batch)

    expected = trained(whole, scales[0])
    weights.clear()
    result = trained(model, scales[1], micro_batch=1)
    assert (gradients(model) - gradients(whole)).norm() / gradients(whole).norm() <= 1e-6
    assert float(scales[1].grad) == pytest.approx(float(scales[0].grad), rel=1e-6)
    assert result.loss == pytest.approx(expected.loss, rel=1e-6)
    assert max(weights) <= (1 + 1e-6) / len(counts)


@pytest.mark.parametrize("counts", RAGGED)
def test_ragged_counts_do_not_overflow_where_the_whole_batch_does_not(counts: list[int]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    batch = 4 * torch.ones(len(counts), 4), torch.tensor(counts)
    options: dict[str, Any] = {"precision": "fp16", "scaler": {"init_scale": 2.0**10}}
    assert one_step(copy.deepcopy(model), weighted, **options)(batch).skipped is None
    assert one_step(model, weighted, micro_batch=1, **options)(batch).skipped is None


def test_gradients_that_were_there_are_cleared() -> None:
    torch.manual_seed(0)
    model, batch = Plain(), images(4)
    extra = nn.Linear(2, 2)
    model.register_module("unused", extra)
    twin = copy.deepcopy(model)
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    step = TrainStep(model, torch.optim.SGD([*model.body.parameters()], 0.1), loss=image_loss)
    step(batch)
    one_step(twin, image_loss)(batch)
    assert differences(state(twin, "the end"), state(model, "the end")) == []
    assert extra.weight.grad is None


def test_a_count_is_checked() -> None:
    model, batch = Plain(), images(4)

    def with_count(count: Any) -> Any:
        return lambda output, batch: (image_loss(output, batch), count)

    for wrong in (-1, float("nan"), "4", True, torch.ones(2)):
        with pytest.raises(gs.errors.GradstowError, match="The count is how many items"):
            one_step(model, with_count(wrong))(batch)
    answers = iter([(4,), ()])

    def now_and_then(output: Tensor, batch: Any) -> Any:
        loss = image_loss(output, batch)
        return (loss, 2) if next(answers) else loss

    with pytest.raises(gs.errors.GradstowError, match="a count for some micro-batches"):
        one_step(model, now_and_then, micro_batch=2)(batch)
    assert one_step(model, with_count(torch.tensor([4.0])))(batch).skipped is None
    with pytest.raises(gs.errors.GradstowError, match="is no loss"):
        TrainStep(model, torch.optim.SGD(model.parameters(), 0.1))(batch)


def test_ignored_labels_are_said_once() -> None:
    model = Transformer(p=0.0)
    step = TrainStep(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        loss=lambda o, b: token_loss(o, b)[0],
        forward=lambda m, b: m(b["x"]),
        micro_batch=2,
    )
    batch = {name: t[1:] for name, t in tokens(5).items()}
    with pytest.warns(UserWarning, match=r"batch\['y'\] holds the label -100") as heard:
        step(batch)
    assert len(heard) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_step(model, token_loss, micro_batch=2)(batch)


# ----------------------------------------------------------------------------------- coupled samples


def coupled_net() -> nn.Module:
    parts = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)]
    return nn.Sequential(nn.Sequential(*parts))


def test_coupled_samples_are_not_split_unasked() -> None:
    torch.manual_seed(0)
    model, batch = coupled_net(), images(6)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(gs.errors.GradstowError, match=r"BatchNorm2d 0\.1 mixes.*micro_batch=None.*eval.*allow_coupled"):
        one_step(model, image_loss, micro_batch=4)(batch)
    assert differences([*before.items()], [*model.state_dict().items()]) == []
    assert one_step(model, image_loss, micro_batch=6)(batch).micro_batches == 1
    assert one_step(model, image_loss)(batch).micro_batches == 1
    assert one_step(model, image_loss, micro_batch=4, allow_coupled=True)(batch).micro_batches == 2
    model[0][1].eval()
    assert one_step(model, image_loss, micro_batch=4)(batch).micro_batches == 2
    model[0][1] = nn.BatchNorm2d(4, track_running_stats=False).eval()
    with pytest.raises(gs.errors.GradstowError, match="BatchNorm2d"):
        one_step(model, image_loss, micro_batch=4)(batch)


def test_declared_coupling() -> None:
    model, batch = Plain(), images(6)
    with pytest.raises(gs.errors.GradstowError, match=r"the loss \(splittable=False\) mixes"):
        one_step(model, image_loss, micro_batch=4, splittable=False)(batch)
    model.head.couples_samples = True
    with pytest.raises(gs.errors.GradstowError, match="Linear head mixes"):
        one_step(model, image_loss, micro_batch=4)(batch)
    other = coupled_net()
    other[0][1].couples_samples = False
    assert one_step(other, image_loss, micro_batch=4)(batch).micro_batches == 2


# ----------------------------------------------------------------------------------------- splitting


def test_every_container_is_split() -> None:
    x, y = torch.arange(5.0), torch.arange(10).view(5, 2)
    scalar, other = torch.tensor(3.0), object()
    batch = {
        "pair": Pair(x, y),
        "list": [x, {"deep": (y, scalar)}],
        "data": Data(x, ["a", "b", "c", "d", "e"]),
        "array": np.arange(5),
        "ordered": OrderedDict(x=x),
        "user": UserDict(x=x),
        "none": None,
        "other": other,
    }
    assert size_of(batch) == 5
    parts = split(batch, 2)
    assert [size_of(p) for p in parts] == [2, 2, 1]
    last = parts[2]
    assert isinstance(last["pair"], Pair)
    assert torch.equal(last["pair"].y, y[4:])
    assert torch.equal(last["list"][1]["deep"][0], y[4:])
    assert last["list"][1]["deep"][1] is scalar
    assert (last["data"].names, last["data"].scale) == (["e"], 2.0)
    assert isinstance(last["data"], Data)
    assert last["array"].tolist() == [4]
    assert isinstance(last["ordered"], OrderedDict)
    assert isinstance(last["user"], UserDict)
    assert torch.equal(last["user"]["x"], x[4:])
    assert last["none"] is None
    assert last["other"] is other
    assert torch.equal(batch["user"]["x"], x), "the batch is as it was"
    assert parts[1]["pair"].x.untyped_storage().data_ptr() == x.untyped_storage().data_ptr(), "a view"
    assert split(batch, 5) == [batch]


class Kept(MutableMapping[str, Any]):
    """Keeps its items somewhere inside, where a shallow copy finds the same ones."""

    def __init__(self, kind: str, **items: Any) -> None:
        inner: Any = {"dict": items, "deep": [{"items": items}], "nested": UserDict()}[kind]
        if kind == "nested":
            inner.data = items
        self.inner, self.kind = inner, kind

    @property
    def items_(self) -> Any:
        return self.inner[0]["items"] if self.kind == "deep" else self.inner

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


class OneForAll(Kept):
    def __copy__(self) -> OneForAll:
        return self

    def __deepcopy__(self, memo: Any) -> OneForAll:
        raise TypeError("a lock")


class Locked(Kept):
    def __setitem__(self, key: str, value: Any) -> None:
        raise RuntimeError("locked")


@pytest.mark.parametrize("kind", ["dict", "deep", "nested"])
@pytest.mark.parametrize("make", [Kept, OneForAll, Locked])
def test_a_mapping_of_your_own_stays_whole(make: type[Kept], kind: str) -> None:
    x, y = torch.arange(5.0), torch.arange(10).view(5, 2)
    batch = make(kind, x=x, y={"deep": y}, name="n")
    parts = split(batch, 2)
    assert batch["x"] is x
    assert batch["y"] == {"deep": y}
    assert list(batch) == ["x", "y", "name"]
    assert torch.equal(torch.cat([part["x"] for part in parts]), x)
    assert torch.equal(torch.cat([part["y"]["deep"] for part in parts]), y)
    assert [part["name"] for part in parts] == ["n"] * 3
    if make is Kept:
        assert all(type(part) is make for part in parts)
    assert parts[1]["x"].untyped_storage().data_ptr() == x.untyped_storage().data_ptr(), "a view"


def test_take_repeats_what_is_missing() -> None:
    batch = (torch.arange(3), ["a", "b", "c"], np.arange(3))
    assert take(batch, 3) is batch
    fewer, more = take(batch, 2), take(batch, 7)
    assert (fewer[0].tolist(), fewer[1], fewer[2].tolist()) == ([0, 1], ["a", "b"], [0, 1])
    assert (more[0].tolist(), more[1][-1], more[2].tolist()) == ([0, 1, 2, 0, 1, 2, 0], "a", [0, 1, 2, 0, 1, 2, 0])


def test_what_cannot_be_split_is_named() -> None:
    with pytest.raises(gs.errors.GradstowError, match=r"batch\['x'\] has 4 samples and batch\['mask'\] has 7"):
        split({"x": torch.ones(4, 2), "mask": torch.ones(7, 7)}, 2)
    with pytest.raises(gs.errors.GradstowError, match=r"no tensor with samples.*step\.window"):
        size_of({"x": torch.tensor(1.0)})
    with pytest.raises(gs.errors.GradstowError, match="at least 1"):
        split(torch.ones(3), 0)
    for wrong in (0, -1, True, "all", 2.0):
        with pytest.raises(gs.errors.GradstowError, match="micro_batch="):
            one_step(Plain(), image_loss, micro_batch=wrong)


@pytest.mark.parametrize("how", ["unstow", "eval"])
def test_a_step_outside_of_its_budget_is_said_once(how: str) -> None:
    torch.manual_seed(0)
    model, batch = Plain(), images(2)
    step = one_step(model, image_loss, budget="1MB")
    assert step(batch).peak_bytes is not None
    with gs.plain(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert step(batch).peak_bytes is None, "asked for, and no plan's"
    if how == "unstow":
        gs.unstow(model)
        says = r"Plain is not stowed any more.*outside of the budget of 1000000 B.*new TrainStep"
    else:
        model.eval()
        says = r"Plain is in eval mode.*outside of the budget of 1000000 B.*model\.train\(\)"
    with pytest.warns(UserWarning, match=says):
        assert step(batch).peak_bytes is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.window([batch, batch])


def test_modes_that_spoil_a_step_are_refused() -> None:
    step, batch = one_step(Plain(), image_loss), images(2)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(gs.errors.GradstowError, match="autocast block"):
        step(batch)
    with torch.no_grad(), pytest.raises(gs.errors.GradstowError, match="no_grad"):
        step(batch)


def test_what_runs_sequences_first_is_said_once() -> None:
    class First(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = torch.nn.LSTM(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0].square().mean()

    model = First()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=2)
    with pytest.warns(UserWarning, match="batch_first=False"):
        step(torch.ones(4, 3, 4))


@pytest.mark.parametrize("kind", ["instance", "spectral"])
def test_what_writes_statistics_is_not_split_unasked(kind: str) -> None:
    conv = torch.nn.Conv1d(2, 4, 1)
    model = torch.nn.Sequential(
        torch.nn.utils.parametrizations.spectral_norm(conv) if kind == "spectral" else conv,
        torch.nn.InstanceNorm1d(4, track_running_stats=kind == "instance"),
    )
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda o, _: o.mean(), micro_batch=2)
    with pytest.raises(gs.errors.GradstowError, match=kind.title()):
        step(torch.ones(4, 2, 5))
