"""A7. Plain autocast casts a leaf once for all of its uses, and adds up their gradients in the short type."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradstow as gs
from equality import Seen, differences, state
from twins import Use, assert_equal_twins, data, steps

How = Callable[[nn.Module, torch.Tensor, int], torch.Tensor]


class Layer(nn.Module):
    """Attention and a feed-forward part, as in ALBERT, which runs the same layer again and again."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(self.before(x)).chunk(3, -1)
        x = x + self.out((q @ k.transpose(-1, -2)).softmax(-1) @ v)
        return x + self.down(functional.gelu(self.up(self.after(x))))


class Albert(nn.Module):
    """``how`` the layer is called; ``broken``: the head is in a graph of its own."""

    def __init__(self, how: How, *, broken: bool = False) -> None:
        super().__init__()
        self.layer, self.head, self.how, self.broken = Layer(), nn.Linear(32, 8), how, broken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for turn in range(3):
            x = self.how(self.layer, x, turn)
        if self.broken:
            torch._dynamo.graph_break()
        return self.head(x)


def _plainly(layer: nn.Module, x: torch.Tensor, turn: int) -> torch.Tensor:
    return layer(x)


def _exact_in_the_middle(layer: nn.Module, x: torch.Tensor, turn: int) -> torch.Tensor:
    with torch.autocast("cpu", enabled=turn != 1):
        return layer(x.float())


def _in_blocks_of_its_own(layer: nn.Module, x: torch.Tensor, turn: int) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return layer(x)


def _without_gradients_at_first(layer: nn.Module, x: torch.Tensor, turn: int) -> torch.Tensor:
    with torch.set_grad_enabled(turn > 0):
        return layer(x)


def _checkpointed(layer: nn.Module, x: torch.Tensor, turn: int) -> torch.Tensor:
    return checkpoint(layer, x, use_reentrant=False)


def _loss(
    model: nn.Module, x: torch.Tensor, dtype: torch.dtype | None = torch.bfloat16, **options: Any
) -> torch.Tensor:
    block = torch.autocast("cpu", dtype, **options) if dtype is not None else contextlib.nullcontext()
    with block:
        output = model(x)
    return output.float().sin().square().mean()


def _train(**options: Any) -> Use:
    return steps(lambda m, step: _loss(m, data(4, 12, 32, seed=step), **options), 2)


@pytest.mark.parametrize("broken", [False, True], ids=["whole", "broken"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_that_runs_three_times(dtype: torch.dtype, broken: bool) -> None:
    assert_equal_twins(lambda: Albert(_plainly, broken=broken), _train(dtype=dtype))


@pytest.mark.parametrize(
    "how", [_exact_in_the_middle, _in_blocks_of_its_own, _without_gradients_at_first, _checkpointed]
)
@pytest.mark.parametrize("options", [{}, {"cache_enabled": False}, {"dtype": None}], ids=str)
def test_blocks_inside_of_the_model(how: How, options: dict[str, Any]) -> None:
    """An inner block keeps the copies of the outer one; without an outer one they are gone at its end."""
    assert_equal_twins(lambda: Albert(how), _train(**options))


def test_it_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradstow.capture._cut.share_casts", lambda module, _inputs, _fake: module)
    found = []
    for stow in (False, True):
        torch.manual_seed(0)
        model = Albert(_plainly)
        found.append(_train()(gs.stow(model, policy="recompute-all") if stow else model))
    assert differences(*found) != []


class Uses(nn.Module):
    """One weight and one bias, used in several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(data(32, 32) / 6), nn.Parameter(data(32) / 6)
        self.norm, self.kind = nn.LayerNorm(32), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.norm(self._use(x)))
        return x

    def _use(self, x: torch.Tensor) -> torch.Tensor:
        w, b = self.weight, self.bias
        h = functional.linear(x, w, b)
        if self.kind == "cast by the model":
            short = x.to(torch.bfloat16)
            return h + functional.linear(short, w.to(torch.bfloat16)) * functional.linear(short, w.bfloat16())
        if self.kind == "looked up":
            return h + functional.embedding(torch.arange(x.shape[1]), w)
        if self.kind == "turned":
            return h + functional.linear(x, w.t()) + x @ w[:, :32]
        if self.kind == "with itself":
            return h + functional.linear(x, w @ w) + functional.linear(w, w, b).mean()
        if self.kind == "promoted":
            return h + torch.cat([x.float()[0], w]).mean() + functional.linear(x, w) * w.norm() + b
        if self.kind == "own gradient":
            return h + Doubling.apply(x, w) + functional.linear(x, w)
        assert self.kind == "read"
        return h


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return 2 * (x @ w)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        gradient = gradient.float()
        return 2 * gradient @ w.t(), 2 * torch.einsum("bti,btj->ij", x.float(), gradient)


KINDS = ["cast by the model", "looked up", "turned", "with itself", "promoted", "own gradient", "read"]


@pytest.mark.parametrize("kind", KINDS)
def test_uses_that_share_a_copy_and_others(kind: str) -> None:
    assert_equal_twins(lambda: Uses(kind), _train())


def test_weights_that_are_no_leaves() -> None:
    """Autocast keeps no copies of them."""

    def make() -> nn.Module:
        model = Albert(_plainly)
        nn.utils.parametrizations.weight_norm(model.layer.up)
        nn.utils.parametrizations.weight_norm(model.layer.mix)
        return model

    assert_equal_twins(make, _train())


def test_shared_convolutions_and_a_tight_budget() -> None:
    """The copy is dropped and made again like any other value."""

    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Conv1d(12, 12, 3, padding=1), nn.BatchNorm1d(12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = functional.relu(self.norm(self.layer(x)))
            return x

    assert_equal_twins(Convolved, _train(), "tight")


def test_frozen_weights() -> None:
    def before(model: nn.Module, step: int) -> None:
        model.layer.up.weight.requires_grad_(step != 1)
        model.layer.mix.requires_grad_(step == 1)

    use = steps(lambda m, step: _loss(m, data(4, 12, 32, seed=step)), 3, before)
    assert_equal_twins(lambda: Albert(_plainly), use)


def test_a_leaf_that_comes_from_outside() -> None:
    """Its gradients are added up in the short type, too."""

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) * self.b(x).tanh() + self.c(x)

    def use(model: nn.Module) -> Seen:
        x = data(12, 32).requires_grad_()
        _loss(model, x).backward()
        return [("gradient of the input", x.grad), *state(model, "step")]

    assert_equal_twins(Three, use)


def test_a_block_that_the_model_holds() -> None:
    class Holds(Albert):
        def __init__(self) -> None:
            super().__init__(_plainly)
            self.block = torch.autocast("cpu", torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with self.block:
                return super().forward(x)

    for dtype in (None, torch.bfloat16):
        assert_equal_twins(Holds, _train(dtype=dtype))


def test_multi_head_attention() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, _ = self.one(x, x, x)
            x, _ = self.one(x, x.flip(0), x)
            return self.one(x, x, x)[0]

    assert_equal_twins(Attends, _train())
