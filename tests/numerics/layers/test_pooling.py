"""Lean max-pooling is torch's own to the last bit, and keeps exactly 4 or 8 bits per output."""

from __future__ import annotations

import copy
import itertools
import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import gradstow as gs
from gradstow.layers._pooling import MaxPool1d, MaxPool2d
from gradstow.layers._saved import saved_bytes
from gradstow.layers.ops import _max_pool
from gradstow.layers.ops._max_pool import max_pool1d, max_pool2d
from numerics.layers.exactly import compiled_differences, differences
from numerics.layers.judge import assert_same_state
from numerics.layers.torch_samples import module_samples, op_samples

WINDOWS = list(
    itertools.product(
        (1, 2, 3, (3, 2), 5, (4, 4), (17, 1)), (None, 1, (2, 3)), (0, 1, 2, (1, 0)), (1, 2), (False, True)
    )
)


def hard(x: torch.Tensor) -> torch.Tensor:
    """With NaN, -inf and many ties."""
    x = x.round()
    x.select(-1, 2).fill_(float("nan"))
    x.select(-1, 4).fill_(-float("inf"))
    x.select(-2, 1).fill_(1)
    return x


def accepts(x: torch.Tensor, *window: Any) -> bool:
    try:
        F.max_pool2d(x.detach(), *window)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "one sample", "sliced"])
def test_equal_to_torch(layout: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = hard(torch.randn(3, 5, 17, 19).to(dtype))
    view = {
        "contiguous": lambda x: x,
        "channels_last": lambda x: x.to(memory_format=torch.channels_last),
        "one sample": lambda x: x[0],
        "sliced": lambda x: x[:, ::2, :, 3:],
    }[layout]
    tried = 0
    for window in WINDOWS:
        if accepts(view(x), *window):
            lean, original = (lambda x, f=f, w=window: f(view(x), *w) for f in (max_pool2d, F.max_pool2d))
            assert differences(lean, original, x) == [], window
            tried += 1
    assert tried > 150


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_one_dimension(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for x in (hard(torch.randn(3, 5, 19).to(dtype)), hard(torch.randn(5, 19).to(dtype))):
        ways = itertools.product((1, 2, 3, (5,)), (None, 2, (3,)), (0, 1), (1, 2), (False, True))
        for kernel, stride, padding, dilation, ceil in ways:
            if padding and kernel == 1:
                continue
            options = (kernel, stride, padding, dilation, ceil)
            lean, original = (lambda x, f=f, o=options: f(x, *o) for f in (max_pool1d, F.max_pool1d))
            assert differences(lean, original, x) == [], options


def test_many_samples_and_odd_sizes() -> None:
    """So that the code is cut between samples, in the middle of a byte if that could be."""
    for shape in ((37, 3, 5, 7), (5, 3, 300, 211), (0, 3, 8, 8), (4, 1, 5, 5), (2, 3, 2, 2)):
        for layout in (torch.contiguous_format, torch.channels_last):
            x = torch.randn(shape).to(memory_format=layout)
            lean, original = (
                partial(max_pool2d, kernel_size=2, stride=1),
                partial(F.max_pool2d, kernel_size=2, stride=1),
            )
            assert differences(lean, original, x) == [], (shape, layout)


def test_strides_of_gradients() -> None:
    x = torch.randn(4, 6, 9, 9)
    for layout in (torch.contiguous_format, torch.channels_last):
        for along in (
            torch.randn(4, 6, 4, 4).to(memory_format=torch.channels_last),
            torch.randn(4, 6, 1, 1).expand(4, 6, 4, 4),
            torch.ones(()).expand(4, 6, 4, 4),
            torch.randn(4, 6, 4, 8)[..., ::2],
        ):
            lean, original = (
                lambda x, f=f, m=layout: f(x.to(memory_format=m), 3, 2) for f in (max_pool2d, F.max_pool2d)
            )
            assert differences(lean, original, x, along) == []


def test_a_window_that_is_all_padding_is_torchs_own() -> None:
    x = torch.randn(1, 1, 1, 4, requires_grad=True)
    assert not _max_pool._knows(x, _max_pool._window(2, 1, 1, 2))
    assert _max_pool._knows(x, _max_pool._window((1, 2), 1, (0, 1), 2))


@pytest.mark.parametrize("kernel", [2, (3, 3), 5])
def test_gradcheck(kernel: Any) -> None:
    torch.manual_seed(0)
    for shape in ((2, 2, 6, 5), (2, 6, 5), (0, 2, 6, 5)):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        assert gradcheck(lambda x: max_pool2d(x, kernel, 2, 1), (x,))
        assert gradgradcheck(lambda x: max_pool2d(x, kernel, 2, 1), (x,))


def test_second_derivatives_are_torchs() -> None:
    x, w = torch.randn(2, 3, 8, 8, requires_grad=True), torch.randn(2, 3, 4, 4, requires_grad=True)
    found = []
    for run in (max_pool2d, F.max_pool2d):
        (first,) = torch.autograd.grad((run(x, 2) * w).sum(), x, create_graph=True)
        found.append(torch.autograd.grad((first**3).sum(), [x, w]))
    assert torch.equal(found[0][0], torch.zeros_like(x))
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_bits_per_output() -> None:
    for shape, kernel, outputs, size in (
        ((2, 3, 8, 8), 2, 96, 48),
        ((1, 1, 10, 10), 2, 25, 13),
        ((2, 3, 8, 8), 4, 24, 12),
        ((1, 3, 25, 25), 5, 75, 75),
        ((1, 3, 32, 32), 16, 12, 12),
        ((0, 3, 8, 8), 2, 0, 0),
    ):
        x = torch.randn(shape, requires_grad=True)
        assert F.max_pool2d(x, kernel).numel() == outputs
        assert saved_bytes(lambda x=x, k=kernel: max_pool2d(x * 1, k)) == size
        assert saved_bytes(lambda x=x, k=kernel: F.max_pool2d(x * 1, k)) == 4 * x.numel() + 8 * outputs
    x = torch.randn(1, 1, 34, 34, requires_grad=True)
    assert saved_bytes(lambda: max_pool2d(x, 17), [x]) == 8 * 4  # torch's own: more than 256 places


@pytest.mark.parametrize("name", ["max_pool1d", "max_pool2d"])
def test_torchs_own_op_samples(name: str) -> None:
    lean, original = getattr(_max_pool, name), getattr(F, name)
    for dtype in (torch.float32, torch.bfloat16):
        count = 0
        for sample in itertools.islice(op_samples(f"nn.functional.{name}", dtype), 0, None, 19):  # of hundreds
            if sample.kwargs.pop("return_indices", False):
                continue
            runs = [lambda x, f=f, s=sample: f(x, *s.args, **s.kwargs) for f in (lean, original)]
            assert differences(runs[0], runs[1], sample.input) == [], sample
            count += 1
        assert count


@pytest.mark.parametrize(("lean", "original"), [(MaxPool1d, nn.MaxPool1d), (MaxPool2d, nn.MaxPool2d)])
def test_torchs_own_module_samples(lean: type[nn.Module], original: type[nn.Module]) -> None:
    count = 0
    for sample in module_samples(original):
        made = [kind(*sample.constructor_input.args, **sample.constructor_input.kwargs) for kind in (lean, original)]
        assert_same_state(made[0], made[1])
        first = [lambda x, m=m: m(x)[0] if m.return_indices else m(x) for m in made]
        assert differences(first[0], first[1], sample.forward_input.args[0]) == []
        count += 1
    assert count


@pytest.mark.parametrize(("lean", "original"), [(MaxPool1d, nn.MaxPool1d), (MaxPool2d, nn.MaxPool2d)])
def test_another_class_is_all_that_a_conversion_needs(lean: type[nn.Module], original: Any) -> None:
    module, x = original(3, 2, 1), torch.randn(3, 10, 11)
    plain = copy.deepcopy(module)
    module.__class__ = lean
    for made in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(made) is lean
        assert differences(made, plain, x) == []
        assert torch.equal(made(x), plain(x))
        assert torch.equal(made.eval()(x), plain(x))
    values, indices = lean(2, return_indices=True)(x.requires_grad_())
    assert indices.dtype == torch.int64


@pytest.mark.parametrize("kernel", [3, 5])
def test_compiled(kernel: int) -> None:
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 3, 9, 11).to(memory_format=layout)
        dynamic = kernel == 3
        assert compiled_differences(lambda x: max_pool2d(x.sin(), kernel, 2, 1), x, dynamic=dynamic) == []


def test_autocast_and_functional_transforms() -> None:
    layer, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 9, 9)
    with torch.autocast("cpu", torch.bfloat16):
        lean, original = (lambda x, f=f: f(layer(x), 2) for f in (max_pool2d, F.max_pool2d))
        assert differences(lean, original, x) == []
    found, right = (torch.func.grad(lambda x, f=f: f(x, 2).sum())(x) for f in (max_pool2d, F.max_pool2d))
    assert torch.equal(found, right)


def test_under_a_plan() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), MaxPool2d(3, 2, 1), nn.Conv2d(8, 8, 3), MaxPool2d(2),
        nn.Flatten(), nn.Linear(72, 4),
    )  # fmt: skip
    x, y = torch.randn(4, 3, 18, 18), torch.randn(4, 4)
    result = gs.verify(model, (x, y), loss=lambda o, b: (o - b[1]).square().mean(), budget="100%", steps=2, rounds=1)
    assert (result.equal, result.differences) == (True, ())


def test_a_damaged_code_writes_nowhere_else() -> None:
    """torch's backward does not check where its indices point."""
    for kernel in (3, 5):
        window = _max_pool._window(kernel, 2, 1, 1 if kernel == 5 else 2)
        for value in (0, 255):
            code = torch.full((16 if kernel == 5 else 8,), value, dtype=torch.uint8)
            gradient = torch.ones(1, 1, 4, 4)
            found = _max_pool.pool_gradient(gradient, code, (1, 1, 9, 9), gradient.stride(), False, window, False)
            assert found.sum() == 16


def test_errors_are_torchs_own() -> None:
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    for window in ((2, 1, 2), (0,), (9,), ((2, 2, 2),)):
        with pytest.raises((RuntimeError, TypeError)) as found:
            max_pool2d(x, *window)
        with pytest.raises((RuntimeError, TypeError)) as right:
            F.max_pool2d(x, *window)
        assert str(found.value) == str(right.value)


def test_the_comparison_sees_a_difference() -> None:
    x = torch.zeros(1, 1, 4, 4)
    other = lambda x: F.max_pool2d(x.flip(-1), 2)  # noqa: E731  # among equals the last, not the first
    assert differences(lambda x: max_pool2d(x, 2), other, x) == ["gradient"]
