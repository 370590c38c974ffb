"""A fused convolution, norm and activation in eval, under autocast, compile and stow; and which pieces are fused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

import gradstow as gs
from gradstow.layers._conv import Conv2d
from gradstow.layers._fused import BNReLU, ConvBN, ConvBNReLU, FusedSequential
from gradstow.layers._saved import saved_bytes
from gradstow.layers.ops._conv_norm import conv_norm_act
from gradstow.layers.ops._fold import folded
from numerics.layers.blocks import (
    ACTS,
    CONV,
    NORM,
    NORMS,
    assert_equal,
    assert_within,
    block,
    fused,
    images,
)
from numerics.layers.judge import assert_same_state, error
from numerics.layers.torch_samples import module_samples


@pytest.mark.parametrize("act", ACTS)
def test_eval_folds(act: str) -> None:
    for n in (1, 2, 3):
        for norm in NORMS:
            for conv in ({}, {"bias": False, "groups": 2}, {"padding": "same", "padding_mode": "circular"}):
                plain = block(n, act, norm, conv)
                for seed in range(3):
                    plain(images(n, (4,), seed=seed))
                plain.eval()
                lean = fused(plain)
                x = images(n, (4,), size=6, seed=7)
                if "affine" not in norm:  # else there is nothing of the norm to train, and it folds
                    assert_equal(lean, plain, x)
                with torch.no_grad():
                    exact = copy.deepcopy(plain).double()(x.double())
                    assert error(lean(x), exact) <= 2 * max(error(plain(x), exact), 6e-8)
                for module in (lean, plain):
                    module[1].requires_grad_(False)
                assert_within(lean, plain, x, 2)


def test_eval_keeps_only_the_input_and_is_never_stale() -> None:
    plain = block(2, "relu", channels=6).eval()
    lean = fused(plain)
    x = images(channels=6)
    known = [*lean.parameters(), *lean.buffers()]
    one, weight = 4 * x.numel(), 4 * lean[0].weight.numel()
    assert saved_bytes(lambda: lean(x), known) == one + 2 * 4 * 6, "and the statistics that the activation saw"
    assert saved_bytes(lambda: plain(x), [*plain.parameters(), *plain.buffers()]) == 3 * one
    lean[1].requires_grad_(False)
    assert saved_bytes(lambda: lean(x), known) == 2 * one + weight + 4 * 6  # input, output; folded weight and scale
    lean[0].requires_grad_(False)
    assert saved_bytes(lambda: lean(x), known) == one + weight
    for change in (
        lambda m: m[1].running_mean.add_(1),
        lambda m: m[1].running_var.data.mul_(2),  # no version is counted here
        lambda m: m[0].weight.data.mul_(0.5),
        lambda m: m[1].bias.data.add_(1),
        lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
    ):
        before = lean(x)
        with torch.no_grad():
            change(lean)
            change(plain)
            torch.testing.assert_close(lean(x), plain(x))
            assert not torch.equal(lean(x), before)
    lean.fold = False
    assert torch.equal(lean(x), plain(x))


def test_a_frozen_norm_in_a_model_that_trains_folds() -> None:
    plain = block(2, "relu")
    plain[1].eval()
    plain[1].requires_grad_(False)
    lean = fused(plain)
    before = [b.clone() for b in lean.buffers()]
    assert_within(lean, plain, images(), 2.001)
    assert all(torch.equal(a, b) for a, b in zip(before, lean.buffers(), strict=True))
    x = images(channels=1).double()
    weight = torch.randn(6, 1, 3, 3, dtype=torch.float64, requires_grad=True)
    mean, variance = torch.randn(6, dtype=torch.float64), torch.rand(6, dtype=torch.float64) + 0.5
    scale, shift = (torch.randn(6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert x.requires_grad
    assert torch.autograd.gradcheck(lambda w, a, b: folded(w, None, mean, variance, a, b, 1e-5), (weight, scale, shift))


@pytest.mark.parametrize("act", ["relu", "leaky", "gelu"])
def test_autocast(act: str) -> None:
    plain = block(2, act)
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(fused(plain), plain, images())
        assert_equal(fused(plain), plain, images().bfloat16().detach().requires_grad_())
        assert fused(plain, "output")(images()).dtype == plain(images()).dtype
        assert fused(plain.eval())(images()).dtype == plain(images()).dtype
        x = images().bfloat16().detach().requires_grad_()
        lean = fused(plain.train())
        known = [*lean.parameters(), *lean.buffers(), x]
        assert saved_bytes(lambda: lean(x), known) == 2 * 4 * 6  # no short copy of the weight
    y = lean(images())
    with torch.autocast("cpu", torch.bfloat16):
        y.sum().backward()


@pytest.mark.parametrize(("act", "keep"), [("relu", "input"), ("leaky", "output")])
def test_compiled(act: str, keep: str) -> None:
    torch._dynamo.reset()
    plain = nn.Sequential(*block(2, act), nn.Flatten(), nn.Linear(180, 8), nn.GELU())
    lean = fused(plain, keep)
    compiled = torch.compile(lean, backend="aot_eager", fullgraph=True, dynamic=keep == "output")
    for batch in (3, 3) if keep == "input" else (3, 5):
        assert_equal(lean, plain, images(batch=(batch,)), compiled)
    if keep == "input":
        with torch.autocast("cpu", torch.bfloat16):
            assert_equal(lean, plain, images(), compiled)
        lean.eval()
        plain.eval()
        assert_equal(lean, plain, images(), compiled)


def test_the_result_may_be_changed_in_place() -> None:
    """As a residual connection does with a block that ends in a norm."""
    plain = block(2, "none")
    lean = fused(plain)
    found = torch.autograd.grad(lean(images()).mul_(2).sum(), list(lean.parameters()))
    right = torch.autograd.grad(plain(images()).mul_(2).sum(), list(plain.parameters()))
    assert all(torch.equal(one, two) for one, two in zip(found, right, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fused(plain, "output")(images()).mul_(2).sum().backward()


def test_pieces() -> None:
    torch.manual_seed(0)
    lean = FusedSequential(
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3),
        nn.BatchNorm2d(6),
        nn.SiLU(),
        nn.Dropout(0.0),
        Conv2d(6, 6, 1),
        nn.LeakyReLU(),
        nn.Conv2d(6, 6, 1),
        nn.BatchNorm2d(6),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 6, 1, bias=False),
        nn.Flatten(),
        nn.Linear(6, 5),
        nn.Tanh(),
        nn.Softmax(1),
    )
    found = [(p.first, p.end) for p in lean.pieces()]
    assert found == [(0, 2), (2, 5), (5, 6), (6, 8), (8, 10), (10, 11), (11, 12), (12, 13), (13, 15), (15, 16)]
    x = images(size=4)
    plain = nn.Sequential(*copy.deepcopy(list(lean)))
    assert_equal(lean, plain, x)
    assert_same_state(lean, plain)
    assert [n for n, _ in lean.named_children()] == [str(i) for i in range(16)]
    assert isinstance(lean[2:5], FusedSequential)


class Own(nn.Conv2d):
    """Somebody's own convolution."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def test_a_child_that_does_more_runs_plainly() -> None:
    def hooked(kind: str, index: int) -> Any:
        def change(m: Any) -> None:
            def seen(*_: Any) -> None:
                m.__dict__.setdefault("seen", []).append(kind)

            getattr(m[index], f"register_{kind}")(seen)

        return change

    def own(m: Any) -> None:
        m[0] = Own(4, 6, 3, padding=1)

    def patched(m: Any) -> None:
        inner = m[2].forward
        m[2].forward = lambda x: inner(x) + 1

    def active(m: Any) -> None:
        m[0].__class__ = Conv2d
        m[0].activation = "tanh"

    def weight_norm(m: Any) -> None:
        nn.utils.parametrizations.weight_norm(m[0])

    def sync(m: Any) -> None:
        m[1] = nn.SyncBatchNorm(6)

    kinds = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")
    watched = [hooked(kind, index) for kind in kinds for index in (0, 1, 2)]
    for change in (*watched, own, patched, active, weight_norm):
        plain = nn.Sequential(*block(2, "tanh"))
        torch.manual_seed(0)
        change(plain)
        lean = copy.deepcopy(plain)
        torch.manual_seed(0)
        lean = nn.Sequential(*block(2, "tanh"))
        change(lean)
        lean.__class__ = FusedSequential
        lean.load_state_dict(plain.state_dict())
        assert len(lean.pieces()) > 1
        assert_equal(lean, plain, images())
        assert lean.__dict__.get("seen") == plain.__dict__.get("seen")
        assert change not in watched or lean.seen
    model = fused(block(2))
    sync(model)
    assert [(p.first, p.end) for p in model.pieces()] == [(0, 1), (1, 2), (2, 3)]
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(type(m).__name__))
    try:
        fused(block(2))(images())
    finally:
        handle.remove()
    assert seen == ["Conv2d", "BatchNorm2d", "ReLU", "FusedSequential"]


def test_blocks() -> None:
    conv, norm, relu = block(2)
    for made, plain in (
        (ConvBNReLU.fuse(conv, norm, relu), nn.Sequential(conv, norm, relu)),
        (ConvBN.fuse(conv, norm), nn.Sequential(conv, norm)),
        (BNReLU.fuse(norm, nn.LeakyReLU(), keep="output"), nn.Sequential(norm, nn.LeakyReLU())),
    ):
        assert [n for n, _ in made.named_children()] == [n for n, _ in plain.named_children()]
        assert made[0] is plain[0]
        assert made.state_dict().keys() == plain.state_dict().keys()
        x = images(channels=4 if made[0] is conv else 6)
        assert torch.equal(made(x), copy.deepcopy(plain)(x))
        for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
            assert type(other) is type(made)
            assert torch.equal(other(x), copy.deepcopy(made)(x))
    with pytest.raises(
        gs.errors.PolicyError, match="ConvBNReLU does not take Conv2d, BatchNorm2d: it joins conv, norm"
    ):
        ConvBNReLU.fuse(conv, norm)
    with pytest.raises(gs.errors.PolicyError, match="ConvBN does not take Conv2d, ReLU"):
        ConvBN.fuse(conv, relu)
    with pytest.raises(gs.errors.PolicyError, match="keep='both'"):
        FusedSequential(conv, keep="both")
    with pytest.raises(gs.errors.PolicyError, match="keep='both' does not exist"):
        conv_norm_act(images(channels=6), None, None, None, norm.weight, norm.bias, keep="both")


def test_torchvisions_block_is_converted_by_its_class_alone() -> None:
    plain = torchvision.ops.Conv2dNormActivation(4, 6, 3)
    lean: Any = copy.deepcopy(plain)
    lean.__class__ = ConvBNReLU
    assert_same_state(lean, plain)
    assert_equal(lean, plain, images())
    assert lean.out_channels == 6
    with torch.no_grad():
        assert torch.equal(lean(images()), plain(images()))  # in training without gradients: plainly


@pytest.mark.parametrize("n", [1, 2, 3])
def test_torchs_module_inputs(n: int) -> None:
    count = 0
    for given in module_samples(NORM[n]):
        made = given.constructor_input
        for act in ("relu", "leaky"):
            plain = nn.Sequential(NORM[n](*made.args, **made.kwargs), *ACTS[act]())
            (x,) = (*given.forward_input.args, *given.forward_input.kwargs.values())
            assert_equal(fused(plain), plain, x)
            assert_within(fused(plain, "output"), plain, x, 20)
            count += 1
    for given in module_samples(CONV[n]):
        made = given.constructor_input
        conv = CONV[n](*made.args, **made.kwargs)
        (x,) = (*given.forward_input.args, *given.forward_input.kwargs.values())
        if x.dim() == n + 2:
            plain = nn.Sequential(conv, NORM[n](conv.out_channels), nn.ReLU())
            assert_equal(fused(plain), plain, x)
            count += 1
    assert count > 8


def test_working_memory() -> None:
    """A step's peak is lower than torch's, too."""

    def peak(model: Any) -> int:
        x = torch.randn(4, 16, 32, 32)
        model(x).sum().backward()
        with gs.measure_peak() as memory:
            model(x).sum().backward()
        return memory.peak_bytes

    plain = nn.Sequential(
        *(m for _ in range(6) for m in (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()))
    )
    tensor = 4 * 4 * 16 * 32 * 32
    lean = peak(fused(plain))
    assert lean <= (6 + 4.5) * tensor
    assert lean <= peak(plain) - 4.9 * tensor


def squares(y: torch.Tensor, _: Any) -> torch.Tensor:
    return y.square().mean()


@pytest.mark.usefixtures("guessed_costs")
def test_stow_trains_it_equally() -> None:
    plain = nn.Sequential(*block(2, "relu"), *block(2, "leaky", channels=6))
    for wanted in ({"budget": "100%"}, {"policy": "recompute-all"}):
        proof = gs.verify(fused(plain), images().detach(), loss=squares, steps=2, rounds=1, **wanted)
        assert proof.equal, proof
        assert proof.compared > 15
    lean = fused(plain, "output")  # while compiling it keeps its input, and has torch's numbers to the last bit
    gs.stow(lean, budget="100%")
    assert_equal(lean, plain, images().detach())


def test_the_comparison_can_fail() -> None:
    plain = block(2)
    lean = fused(plain)
    lean[1].eps *= 1.01
    with pytest.raises(AssertionError):
        assert_equal(lean, plain, images())
    lean[1].eps = 1e-3
    with pytest.raises(AssertionError):
        assert_within(lean, plain, images(), 20)
