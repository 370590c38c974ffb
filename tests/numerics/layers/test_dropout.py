"""Lean dropout is torch's own to the last bit, random numbers included, and keeps exactly one bit per element."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import gradstow as gs
from gradstow.layers._dropout import Dropout
from gradstow.layers._saved import saved_bytes
from gradstow.layers.ops._dropout import dropout
from numerics.layers.exactly import compiled_differences, differences
from numerics.layers.judge import assert_same_state
from numerics.layers.torch_samples import module_samples, op_samples


def both(lean: bool, p: float, inplace: bool, x: torch.Tensor) -> torch.Tensor:
    run = dropout if lean else F.dropout
    return run(x * 1, p, True, True) if inplace else run(x, p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("inplace", [False, True])
def test_equal_to_torch(inplace: bool, dtype: torch.dtype) -> None:
    for shape in ((3, 5, 7, 9), ((1 << 19) + 11,), (0, 3), ()):
        for p in (0.0, 0.1, 0.5, 0.77, 1.0):
            x = torch.randn(shape).to(dtype)
            assert differences(partial(both, True, p, inplace), partial(both, False, p, inplace), x) == [], (shape, p)
    x = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40] * 9).to(dtype)
    assert differences(partial(both, True, 0.5, inplace), partial(both, False, 0.5, inplace), x) == []


def test_strides() -> None:
    shape = (4, 6, 5, 8)
    plain = torch.randn(shape)
    alongs = [
        plain,
        plain.to(memory_format=torch.channels_last),
        torch.randn(4, 6, 1, 1).expand(shape),
        torch.ones(()).expand(shape),
        torch.randn(4, 6, 5, 16)[..., ::2],
    ]
    for view in (
        lambda x: x,
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x[:, :1].expand(shape),
        lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
        lambda x: torch.cat([x, x], 3)[..., ::2],
    ):
        for along in alongs:
            lean, original = (lambda x, f=f, v=view: f(v(x), 0.3) for f in (dropout, F.dropout))
            assert differences(lean, original, plain, along) == []


@pytest.mark.parametrize("inplace", [False, True])
def test_gradcheck(inplace: bool) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return both(True, 0.3, inplace, x)

    for shape in ((2, 3, 4), (0, 3), ()):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        assert gradcheck(run, (x,))
        assert gradgradcheck(run, (x,))


@pytest.mark.parametrize("n", [1, 8, 9, 1000, (1 << 19) + 1])
def test_one_bit_per_element(n: int) -> None:
    x = torch.randn(n, requires_grad=True)
    for inplace in (False, True):
        assert saved_bytes(lambda inplace=inplace: both(True, 0.3, inplace, x), [x]) == -(-n // 8)
        assert saved_bytes(lambda inplace=inplace: both(False, 0.3, inplace, x), [x]) == 4 * n  # on CPU
    assert saved_bytes(lambda: dropout(x, 0.0), [x]) == 0


def test_torchs_own_op_samples() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        samples = list(op_samples("nn.functional.dropout", dtype))
        for sample in samples:
            lean, original = (lambda x, f=f, s=sample: f(x * 1, *s.args, **s.kwargs) for f in (dropout, F.dropout))
            assert differences(lean, original, sample.input) == []
        assert samples


def test_torchs_own_module_samples() -> None:
    for sample in module_samples(nn.Dropout):
        made = [
            kind(*sample.constructor_input.args, **sample.constructor_input.kwargs) for kind in (Dropout, nn.Dropout)
        ]
        assert_same_state(made[0], made[1])
        assert differences(made[0], made[1], sample.forward_input.args[0]) == []


def test_another_class_is_all_that_a_conversion_needs() -> None:
    module, x = nn.Dropout(0.3), torch.randn(3, 40)
    plain = copy.deepcopy(module)
    module.__class__ = Dropout
    for made in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert isinstance(made, Dropout)
        assert differences(made, plain, x) == []
        with torch.no_grad():
            torch.manual_seed(0)
            y = made(x)
            torch.manual_seed(0)
            assert torch.equal(y, plain(x))
        assert made.eval()(x) is x


def test_compiled() -> None:
    """With eager's own random numbers, which torch's dropout has not there."""
    x = torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)
    for dynamic in (False, True):
        assert compiled_differences(lambda x: dropout(x.sin(), 0.3), x, dynamic=dynamic) == []


def test_autocast() -> None:
    layer = nn.Linear(40, 40)
    with torch.autocast("cpu", torch.bfloat16):
        lean, original = (lambda x, f=f: f(layer(x), 0.3) for f in (dropout, F.dropout))
        assert differences(lean, original, torch.randn(3, 40)) == []


def test_under_a_plan() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 32), Dropout(0.3), nn.Linear(32, 32), Dropout(0.2, inplace=True), nn.Linear(32, 4)
    )  # fmt: skip
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    result = gs.verify(model, (x, y), loss=lambda o, b: (o - b[1]).square().mean(), budget="100%", steps=2, rounds=1)
    assert (result.equal, result.differences) == (True, ())


def test_errors_are_torchs_own() -> None:
    x = torch.randn(4, requires_grad=True)
    with pytest.raises(ValueError, match="between 0 and 1"):
        dropout(x, 1.5)
    with pytest.raises(RuntimeError, match="leaf"):
        dropout(x, 0.5, inplace=True)


def test_the_comparison_sees_a_difference() -> None:
    x = torch.randn(1000)
    assert differences(lambda x: dropout(x, 0.3), lambda x: F.dropout(x, 0.31), x)[:2] == ["output", "gradient"]
    assert differences(lambda x: dropout(x, 0.3), lambda x: F.dropout(x, 0.3) + 0 * torch.rand(1000), x) == ["random"]
