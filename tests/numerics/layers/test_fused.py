"""Convolution, batch norm and activation as one node, against torch's three: in training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import gradstow as gs
from gradstow.layers._saved import saved_bytes
from numerics.layers.blocks import (
    ACTS,
    NORMS,
    assert_equal,
    assert_within,
    bare,
    block,
    fused,
    images,
    step,
)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_bit_equal(n: int, act: str) -> None:
    for norm in NORMS:
        plain = block(n, act, norm)
        lean = fused(plain)
        for seed in (1, 2):  # the second step sees the statistics of the first
            assert_equal(lean, plain, images(n, seed=seed))
    for conv in (
        {"stride": 2, "groups": 2, "bias": False},
        {"padding": "same", "dilation": 2},
        {"padding_mode": "circular"},
        {"kernel_size": 2, "padding": "same"},
        {"kernel_size": 1, "padding": 0},
    ):
        plain = block(n, act, conv=conv)
        assert_equal(fused(plain), plain, images(n))


@pytest.mark.parametrize("act", ACTS)
def test_bit_equal_in_other_types_and_layouts(act: str) -> None:
    plain = block(2, act)
    for dtype in (torch.float64, torch.bfloat16):
        other = copy.deepcopy(plain).to(dtype)
        assert_equal(fused(other), other, images().to(dtype).detach().requires_grad_())
    x = images(2, (4,), size=8)
    last = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    for strange in (
        x.contiguous(memory_format=torch.channels_last),
        x.transpose(2, 3),
        x[:, :, ::2, 1:],
        x[:1].expand(3, -1, -1, -1),
        x[:0],
    ):
        strange = strange.detach().requires_grad_()
        assert_equal(fused(plain), plain, strange)
        assert_equal(fused(last), last, strange)
    mixed = nn.Sequential(plain[0].bfloat16(), *list(plain)[1:])  # as under autocast: short numbers, float32 norm
    assert_equal(fused(mixed), mixed, images().bfloat16().detach().requires_grad_())


@pytest.mark.parametrize("act", ["relu", "leaky", "gelu"])
def test_norm_and_activation(act: str) -> None:
    for training in (True, False):
        norm_and_activation(act, training)


def norm_and_activation(act: str, training: bool) -> None:
    for n, shape in ((1, (4, 6)), (1, (4, 6, 5)), (2, (2, 6, 3, 4)), (3, (2, 6, 2, 3, 2))):
        for norm in NORMS:
            plain = nn.Sequential(*list(block(n, act, norm))[1:])
            generator = torch.Generator().manual_seed(3)
            x = torch.randn(shape, generator=generator).requires_grad_()
            plain.train(training)
            assert len(fused(plain).pieces()) == 1
            assert_equal(fused(plain), plain, x)


@pytest.mark.parametrize(
    "freeze", [("0.",), ("0.weight",), ("1.",), ("0.", "1."), ("input",), ("input", "0."), ("1.bias",)]
)
def test_frozen_parts(freeze: tuple[str, ...]) -> None:
    for act in ("relu", "leaky", "none"):
        for keep in ("input", "output"):
            plain = block(2, act)
            for name, parameter in plain.named_parameters():
                parameter.requires_grad_(not name.startswith(freeze))
            for x in (images(), images().to(memory_format=torch.channels_last)):
                x = x.detach().requires_grad_("input" not in freeze)
                if keep == "input" or act == "relu":
                    assert_equal(fused(plain, keep), plain, x)
                else:
                    assert_within(fused(plain, keep), plain, x, 20)


def test_saved_bytes() -> None:
    """One tensor instead of three, and two numbers per channel."""
    x = images(2, (4,), channels=6, size=8)
    one = 4 * x.numel()  # the convolution's output has the input's size here
    statistics = 2 * 4 * 6
    for act in ACTS:
        plain = block(2, act, channels=6)
        known = [*plain.parameters(), *plain.buffers()]
        assert saved_bytes(lambda plain=plain: plain(x), known) >= (3 if act != "none" else 2) * one + statistics

        def count(model: Any, known_too: Any = ()) -> int:
            return saved_bytes(lambda: model(x), [*model.parameters(), *model.buffers(), *known_too])

        assert count(fused(plain)) == one + statistics
        assert count(fused(plain), [x]) == statistics  # the layer before keeps it
    for act, tensors in (("leaky", 2), ("none", 2), ("relu", 1), ("silu", 1)):
        lean = fused(block(2, act, channels=6), "output")
        one_statistic = statistics // 2 if tensors == 2 else statistics
        assert count(lean) == tensors * one + one_statistic
        lean[0].requires_grad_(False)
        assert count(lean) == one + one_statistic  # the output alone, or the input alone
    assert count(fused(bare("relu"))) == one + statistics
    assert count(fused(bare("leaky"), "output")) == one + statistics // 2
    assert count(bare("leaky")) == 2 * one + statistics  # torch


@pytest.mark.parametrize("act", ["leaky", "none"])
def test_from_the_output(act: str) -> None:
    """Not bit-equal: the forward is, and gradients are within the stated ratio."""
    for norm in NORMS:
        for n in (1, 2, 3):
            plain = block(n, act, norm)
            lean = fused(plain, "output")
            assert_within(lean, plain, images(n, (6,), size=6), 20)
            right = step(plain, images(n, seed=9))
            for name, found in step(lean, images(n, seed=9)).items():
                if "gradient" not in name and name != "input":
                    assert torch.equal(found, right[name]), name
    plain = bare("leaky")
    with torch.no_grad():
        plain[0].weight.mul_(-1)  # the sign does not matter
    x = images(2, (6,), channels=6, size=6)
    assert_within(fused(plain, "output"), plain, x, 20)
    other = copy.deepcopy(plain).double()
    assert_within(fused(other, "output"), other, x.detach().double().requires_grad_(), 20)


@pytest.mark.parametrize("weight", [0.0, 1e-6, -0.05, float("nan")])
def test_a_norm_that_cannot_be_inverted_keeps_the_input(weight: float) -> None:
    plain = bare("leaky")
    with torch.no_grad():
        plain[0].weight[2] = weight
        plain[0].bias[2] = 1.0
    x = images(channels=6)
    lean = fused(plain, "output")
    if weight == weight:
        assert_equal(lean, plain, x)
    known = [*lean.parameters(), *lean.buffers(), x]
    assert saved_bytes(lambda: lean(x), known) == 2 * 4 * 6


@pytest.mark.parametrize("keep", ["input", "output"])
@pytest.mark.parametrize("act", ["relu", "leaky", "gelu", "none"])
def test_gradcheck(act: str, keep: str) -> None:
    for make in (
        lambda: block(1, act, channels=2, conv={"kernel_size": 2, "padding": 0}),
        lambda: block(1, act, conv={"bias": False}, channels=1),
    ):
        plain = make().double()
        lean = fused(plain, keep)
        x = images(1, (2,), channels=plain[0].in_channels, size=3).double().detach().requires_grad_()
        names = [name for name, _ in lean.named_parameters()]

        def run(x: Any, *values: Any, lean: Any = lean, names: Any = names) -> Any:
            return torch.func.functional_call(lean, dict(zip(names, values, strict=True)), (x,))

        inputs = (x, *(p.detach().requires_grad_() for p in lean.parameters()))
        assert torch.autograd.gradcheck(run, inputs)
        assert torch.autograd.gradgradcheck(run, inputs)
    for training in (True, False):
        lean = fused(bare(act).double(), keep).train(training)
        x = torch.randn(3, 6, 2, 1, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lean, (x,))
        if keep == "input" or not training:
            assert torch.autograd.gradgradcheck(lean, (x,))


def test_double_backward_without_the_input_is_refused() -> None:
    lean = fused(block(2, "leaky"), "output")
    lean[0].requires_grad_(False)
    x = images()
    lean(x).sum().backward()
    with pytest.raises(gs.errors.GradstowError, match=r'frozen convolution.*Set keep="input"'):
        torch.autograd.grad(lean(x).sum(), x, create_graph=True)


def test_a_block_used_twice_has_one_gradient_in_each_order() -> None:
    plain = block(2, "relu", channels=6).double()
    lean = fused(plain)
    x = images(channels=6).double().detach().requires_grad_()
    right = torch.autograd.grad(plain(plain(x)).square().sum(), list(plain.parameters()))
    first = torch.autograd.grad(lean(lean(x)).square().sum(), list(lean.parameters()))
    again = torch.autograd.grad(lean(lean(x)).square().sum(), list(lean.parameters()), create_graph=True)
    for one, two, three in zip(first, again, right, strict=True):
        torch.testing.assert_close(one, three)
        torch.testing.assert_close(two, three)


def test_one_value_per_channel_is_torchs_error() -> None:
    for n in (1, 2, 3):
        plain = block(n)
        lean = fused(plain)
        x = torch.randn(1, 4, *(1,) * n)
        with pytest.raises(ValueError, match="Expected more than 1 value per channel") as right:
            plain(x)
        with pytest.raises(ValueError, match="Expected more than 1 value per channel") as found:
            lean(x)
        assert str(found.value) == str(right.value)
        assert torch.equal(lean[1].num_batches_tracked, plain[1].num_batches_tracked)
        lean.eval()(x)


def test_what_torch_refuses_is_refused_in_its_words() -> None:
    for plain, x in (
        (block(2), images(batch=())),  # the norm wants a batch
        (block(2), images(channels=5)),
        (bare(), images(1, channels=6)),
        (bare(), images(channels=5)),
        (nn.Sequential(nn.Conv2d(4, 5, 3), nn.BatchNorm2d(6), nn.ReLU()), images()),
        (nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm1d(6), nn.ReLU()), images()),
    ):
        with pytest.raises((ValueError, RuntimeError)) as right:
            plain(x)
        with pytest.raises((ValueError, RuntimeError)) as found:
            fused(plain)(x)
        assert (type(found.value), str(found.value)) == (type(right.value), str(right.value))
