"""Gradients that arrive in another memory layout than the output has: eager sums in their order, and so do we."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

import gradstow as gs
import twins
from equality import differences
from gradstow.capture import arrived_strides
from gradstow.capture._layouts import _OPS, real_layouts

pytestmark = pytest.mark.usefixtures("guessed_costs")


class Series(nn.Module):
    """Channels before time in the first part, after it in the second; sums over both in the first one's backward."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.conv, self.norm, self.scale = nn.Conv1d(16, 24, 5), nn.BatchNorm1d(24), nn.Parameter(torch.ones(24, 1))
        self.last, self.parts = nn.Linear(24, 8), parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.conv(x)).tanh() * self.scale
        if self.parts == 2:
            torch._dynamo.graph_break()
        return self.last(h.transpose(1, 2)) if self.parts else h


def squares(model: nn.Module, _step: int) -> torch.Tensor:
    """The gradient comes back with time before channels."""
    out = model(twins.data(3, 16, 83)).transpose(1, 2).reshape(3 * 79, -1)
    return (out @ twins.data(out.shape[1], 7)).square().mean()


def unplanned(model: nn.Module) -> int:
    run = model._compiled_call_impl.last
    return sum(p.unplanned_runs for e in run._executors.values() for p in e.programs)


@pytest.mark.parametrize("policy", twins.POLICIES)
@pytest.mark.parametrize("parts", [0, 1, 2])
def test_gradients_in_another_layout_are_equal(parts: int, policy: str) -> None:
    model = twins.assert_equal_twins(lambda: Series(parts), twins.steps(squares), policy)
    assert unplanned(model) == 3 * max(parts, 1)


@pytest.mark.parametrize("parts", [0, 2])
def test_it_would_be_seen(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With AOTAutograd's own copies the last bits differ."""
    monkeypatch.setattr("gradstow.execute._executor.keep_layouts", lambda: None)
    found = []
    for stow in (False, True):
        torch.manual_seed(0)
        model = Series(parts)
        found.append(twins.steps(squares)(gs.stow(model, policy="recompute-all") if stow else model))
    assert differences(*found) != []


def test_only_layouts_that_mean_something_are_told_apart() -> None:
    x = torch.zeros(4, 1, 6)
    assert arrived_strides([x], ((6, 999, 1),)) == ((6, 999, 1),)
    assert arrived_strides([x.transpose(0, 2)], ((4, 4, 1),)) == ((1, 6, 6),)
    assert arrived_strides([None], ((6, 6, 1),)) == ((6, 6, 1),)


class OnePixel(nn.Module):
    """Images of one pixel, of which one comes in another order of dimensions: strides that mean the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mixed = nn.Conv2d(8, 192, 1), nn.Linear(192, 192)
        self.depthwise, self.norm = nn.Conv2d(192, 192, 3, padding=1, groups=192), nn.BatchNorm2d(192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        z = self.mixed(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.norm(self.depthwise(y + z))


def one_pixel_steps(model: nn.Module) -> twins.Seen:
    return twins.steps(lambda m, step: (m(twins.data(16, 8, 1, 1, seed=step)) * twins.data(16, 192, 1, 1)).sum())(model)


@pytest.mark.parametrize("policy", ["store-all", *twins.POLICIES])
def test_images_of_one_pixel(policy: str) -> None:
    twins.assert_equal_twins(OnePixel, one_pixel_steps, policy)


def test_a_result_written_over_other_strides_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradstow.capture._inplace._ambiguous", lambda _value: False)
    found = []
    for stow in (False, True):
        torch.manual_seed(0)
        model = OnePixel().train()
        found.append(one_pixel_steps(gs.stow(model, policy="store-all") if stow else model))
    assert differences(*found) != []


class Pairs(nn.Module):
    """Both ways of a matrix of similarities in the loss, as CLIP has it; the matrix itself is handed out, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(8, 16), nn.Linear(8, 16), nn.Parameter(torch.tensor(2.6))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.a(x) @ self.b(x.flip(1)).t() * self.scale.exp()
        right = torch.arange(len(x))
        both = nn.functional.cross_entropy(logits, right) + nn.functional.cross_entropy(logits.t(), right)
        return {"loss": both / 2, "logits": logits, "other": logits.t()}


def pairs_steps(model: nn.Module) -> twins.Seen:
    return twins.steps(lambda m, step: m(twins.data(24, 8, seed=step))["loss"], count=6)(model)


@pytest.mark.parametrize("policy", ["store-all", *twins.POLICIES])
def test_a_sum_of_gradients_of_which_one_never_arrives(policy: str) -> None:
    twins.assert_equal_twins(Pairs, pairs_steps, policy)


def test_a_result_of_unsure_layout_written_over_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradstow.capture._normalize.UNSURE", "nobody looks here")
    monkeypatch.setattr("gradstow.capture._normalize._lay_out_again", lambda _graph: None)
    found = []
    for stow in (False, True):
        torch.manual_seed(0)
        model = Pairs().train()
        found.append(pairs_steps(gs.stow(model, policy="store-all") if stow else model))
    assert differences(*found) != []


class Sideways(nn.Module):
    """An op on a transposed tensor, whose result real kernels lay out otherwise than fakes; views follow."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.after, self.kind = nn.Linear(24, 24), nn.Linear(24, 24), kind
        self.norm: nn.Module = nn.BatchNorm2d(24) if kind == "images" else nn.BatchNorm1d(24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        turned = h.transpose(1, 2)
        if self.kind == "series":
            return self.after(self.norm(turned).transpose(1, 2)).square().mean()
        if self.kind == "images":
            h = h.view(2, 4, 5, 24).permute(0, 3, 2, 1)
            return self.after(self.norm(h).permute(0, 2, 3, 1)).square().mean()
        if self.kind in LOSSES:
            return LOSSES[self.kind](turned * 2, x.transpose(1, 2).contiguous())
        return self.after(getattr(nn.functional, self.kind)(turned).contiguous().transpose(1, 2)).square().mean()


LOSSES = {
    "mse_loss": nn.functional.mse_loss,
    "smooth_l1_loss": nn.functional.smooth_l1_loss,
    "huber_loss": nn.functional.huber_loss,
}


@pytest.mark.parametrize("policy", twins.POLICIES)
@pytest.mark.parametrize(
    "kind", ["images", "series", "elu", "hardtanh", "hardswish", "hardsigmoid", "softplus", "log_softmax", *LOSSES]
)
@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
def test_an_op_on_a_transposed_tensor(kind: str, policy: str) -> None:
    use = twins.steps(lambda model, step: model(twins.data(2, 20, 24, seed=step)))
    twins.assert_equal_twins(lambda: Sideways(kind), use, policy)


def _turned() -> torch.Tensor:
    return twins.data(4, 8, 3).transpose(1, 2)


PAIRS = {
    "turned": lambda: (_turned(), _turned()),
    "gradient": lambda: (_turned().contiguous(), _turned()),
    "input": lambda: (_turned(), _turned().contiguous()),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("op", _OPS, ids=str)
def test_fakes_lie_as_the_real_results(op: torch._ops.OpOverload, pair: str) -> None:
    x, gradient = PAIRS[pair]()
    statistics = [torch.zeros(3), torch.ones(3)]
    arguments: dict[str, tuple[Any, ...]] = {
        "native_group_norm": (x, None, None, 4, 3, 8, 3, 1e-5),
        "native_group_norm_backward": (gradient, x, torch.zeros(4, 3), torch.ones(4, 3), None, 4, 3, 8, 3, [True] * 3),
        "native_batch_norm": (x, None, None, *statistics, True, 0.1, 1e-5),
        "_native_batch_norm_legit": (x, None, None, *statistics, True, 0.1, 1e-5),
        "_native_batch_norm_legit_functional": (x, None, None, *statistics, True, 0.1, 1e-5),
        "native_batch_norm_backward": (gradient, x, None, None, None, *statistics, True, 1e-5, [True] * 3),
        "binary_cross_entropy": (x.sigmoid(), gradient.sigmoid(), None, 0),
        "elu_backward": (gradient, 1.0, 1.0, 1.0, False, x),
        "hardtanh_backward": (gradient, x, -1.0, 1.0),
        "softplus_backward": (gradient, x, 1.0, 20.0),
        "_log_softmax_backward_data": (gradient, x, -1, torch.float32),
        "huber_loss_backward": (torch.tensor(1.0), x, gradient, 1, 1.0),
        "smooth_l1_loss_backward": (torch.tensor(1.0), x, gradient, 1, 1.0),
        "mse_loss_backward": (torch.tensor(1.0), x, gradient, 1),
        "native_layer_norm_backward": (
            gradient, x, [8], torch.zeros(4, 3, 1), torch.ones(4, 3, 1), None, None, [True, False, False]
        ),
    }  # fmt: skip
    name = op._schema.name.partition("::")[2]
    given = arguments.get(name, (gradient, x))
    if op._overloadname == "no_stats":
        given = (x, None, None, True, 0.1, 1e-5)
    real = op(*given)
    with real_layouts(), FakeTensorMode() as mode:
        fake = op(*pytree.tree_map_only(torch.Tensor, mode.from_tensor, given))
    first, other = (r if isinstance(r, torch.Tensor) else r[0] for r in (real, fake))
    assert other.shape == first.shape
    assert other.stride() == first.stride()


class Predicts(nn.Module):
    """Returns its loss and a prediction whose gradient never arrives: without that the loss's own lies otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(24, 20), nn.Parameter(torch.ones(1, 1, 24))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        prediction = self.linear(x.transpose(1, 2).contiguous().transpose(1, 2)).transpose(1, 2)
        prediction = prediction * prediction.detach().std() + 1
        return nn.functional.mse_loss(prediction, x.transpose(1, 2)[:, :20].contiguous()), prediction


@pytest.mark.parametrize("policy", ["store-all", *twins.POLICIES])
def test_a_loss_beside_a_prediction_that_lies_otherwise(policy: str) -> None:
    use = twins.steps(lambda model, step: model(twins.data(2, 20, 24, seed=step))[0])
    twins.assert_equal_twins(Predicts, use, policy)
