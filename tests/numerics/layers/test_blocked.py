"""A linear layer cut into blocks: one product's error, nothing kept but the input, joined before use."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradstow as gs
from gradstow.layers._blocked import BlockedLinear
from gradstow.layers._saved import saved_bytes
from gradstow.layers.ops import _blocked
from gradstow.layers.ops._blocked import blocked_linear, relu_sparse_linear
from numerics.layers.judge import assert_no_worse, assert_same_state, gradients
from numerics.layers.torch_samples import module_samples, op_samples


@pytest.fixture(params=[1, 3])
def workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many threads the machine has for each of torch's."""
    monkeypatch.setattr(_blocked.os, "cpu_count", lambda: request.param * torch.get_num_threads())
    return int(request.param)


def layer(inputs: int, outputs: int, bias: bool = True, block: int = 16, **options: Any) -> BlockedLinear:
    torch.manual_seed(0)
    made = nn.Linear(inputs, outputs, bias, **options)
    made.__class__ = BlockedLinear
    assert isinstance(made, BlockedLinear)
    made.block = block
    return made


def parts(made: nn.Linear, *shape: int) -> list[torch.Tensor | None]:
    x = torch.randn(*shape, made.in_features, generator=torch.Generator().manual_seed(1)).to(made.weight.dtype)
    return [x.requires_grad_(), made.weight, made.bias]


@pytest.mark.parametrize("shape", [(64,), (70,), (3, 5, 7), (), (1,)])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (33, 50), (200, 17), (5, 100)])
@pytest.mark.parametrize("bias", [True, False])
def test_all_shapes(workers: int, shape: tuple[int, ...], inputs: int, outputs: int, bias: bool) -> None:
    given = parts(layer(inputs, outputs, bias), *shape)
    assert_no_worse(lambda *a: blocked_linear(*a, block=16), F.linear, given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats(dtype: torch.dtype) -> None:
    given = parts(layer(64, 80, dtype=dtype), 70)
    assert_no_worse(lambda *a: blocked_linear(*a, block=32), F.linear, given)


def test_strides_and_frozen_parts() -> None:
    weight = torch.randn(40, 60).t().requires_grad_()  # (60, 40), columns first
    x = torch.randn(40, 50).t().requires_grad_()
    wide = torch.randn(1, 40).expand(50, 40).requires_grad_()
    for given in ([x, weight], [wide, weight], [x.detach(), weight], [x, weight.detach()]):
        assert_no_worse(lambda *a: blocked_linear(*a, block=16), F.linear, given)


def test_gradcheck() -> None:
    given = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 4), (5, 4), (5,))]
    assert torch.autograd.gradcheck(lambda *a: blocked_linear(*a, block=2), given)
    assert torch.autograd.gradgradcheck(lambda *a: blocked_linear(*a, block=2), given)


def test_the_blocks_and_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of 64² in blocks of 16² is 16 blocks, and so is each gradient; all threads take part."""
    seen: list[tuple[tuple[int, ...], str]] = []
    real, both = _blocked._one_block, threading.Barrier(2, timeout=20)

    def spy(*args: Any) -> None:
        seen.append((tuple(args[3][args[4], args[5]].shape), threading.current_thread().name))
        if len(seen) <= 2:
            both.wait()  # only two threads can pass
        real(*args)

    monkeypatch.setattr(_blocked, "_one_block", spy)
    monkeypatch.setattr(_blocked.os, "cpu_count", lambda: 2 * torch.get_num_threads())
    lean = layer(64, 64)
    result = lean(torch.randn(64, 64, requires_grad=True))
    assert [s for s, _ in seen] == [(16, 16)] * 16
    assert all(name.startswith("gradstow blocks") for _, name in seen)
    result.sum().backward()
    assert len(seen) == 48


def test_an_error_of_a_block_is_raised(workers: int) -> None:
    with pytest.raises(RuntimeError, match="dtype|type"):
        blocked_linear(torch.randn(40, 8, requires_grad=True), torch.randn(40, 8, dtype=torch.float64), block=16)


def test_kept_is_the_input_only() -> None:
    lean = layer(64, 48)
    x = torch.randn(70, 64, requires_grad=True)
    hidden = x * 1
    known = [*lean.parameters()]
    assert saved_bytes(lambda: lean(hidden), known) == hidden.numel() * 4
    assert saved_bytes(lambda: lean(hidden), [*known, hidden]) == 0
    lean.weight.requires_grad_(False)
    assert saved_bytes(lambda: lean(hidden), known) == 0


def test_the_peak_is_the_results() -> None:
    lean = layer(256, 256, block=64)
    x = torch.randn(256, 256, requires_grad=True)
    with gs.measure_peak() as memory:
        lean(x).backward(torch.ones(256, 256))
    assert memory.peak_bytes <= 4 * 4 * 256 * 256 + 4096  # output, its gradient, those of input and weight


def test_torchs_sample_inputs() -> None:
    compared = 0
    for sample in op_samples("nn.functional.linear", torch.float32):
        given = [sample.input, *sample.args]
        lean, plain = gradients(lambda *a: blocked_linear(*a, block=2), given), gradients(F.linear, given)
        for a, b in zip([lean[0], *lean[1]], [plain[0], *plain[1]], strict=True):
            assert a is b is None or torch.allclose(a, b, rtol=1e-5, atol=1e-4)  # numbers up to 10, sums to 1000
        compared += 1
    for sample in module_samples(nn.Linear):
        plain_layer = nn.Linear(*sample.constructor_input.args, **sample.constructor_input.kwargs)
        call = sample.forward_input
        given = [*call.args, *call.kwargs.values(), *plain_layer.parameters()]
        lean, plain = gradients(lambda *a: blocked_linear(*a, block=2), given), gradients(F.linear, given)
        assert torch.allclose(lean[0], plain[0], rtol=1e-5, atol=1e-5)
        compared += 1
    assert compared > 5


def test_the_module() -> None:
    lean, plain = layer(40, 50), nn.Linear(40, 50)
    assert_same_state(lean, plain)
    x = torch.randn(60, 40)
    for clone in (copy.deepcopy(lean), pickle.loads(pickle.dumps(lean))):
        assert type(clone) is BlockedLinear
        assert torch.equal(clone(x), lean(x))
    with torch.no_grad():
        assert torch.equal(lean(x), plain(x))
    assert lean(x[:0]).shape == (0, 50)
    with torch.autocast("cpu", torch.bfloat16):
        assert lean(x).dtype == plain(x).dtype == torch.bfloat16
        assert torch.allclose(lean(x), plain(x), atol=1e-2)
    with pytest.raises(gs.errors.GradstowError, match="block=0 rows"):
        blocked_linear(x, lean.weight, block=0)


def test_compiled_and_checked() -> None:
    lean = layer(40, 50)
    x = torch.randn(60, 40, requires_grad=True)
    compiled = torch.compile(lambda x: lean(x * 2).relu(), backend="aot_eager", fullgraph=True)
    one, two = gradients(compiled, [x]), gradients(lambda x: lean(x * 2).relu(), [x])
    assert torch.equal(one[0], two[0])
    assert one[1][0] is not None
    assert torch.equal(one[1][0], two[1][0])
    torch.library.opcheck(torch.ops.gradstow.blocked_product.default, (x, lean.weight.t(), lean.bias, 16))


def test_stowed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    for child in model:
        if isinstance(child, nn.Linear):
            child.__class__ = BlockedLinear
            child.block = 32
    batch = (torch.randn(256, 32), None)
    proof = gs.verify(model, batch, loss=lambda y, _: y.square().mean(), budget="85%", steps=2, rounds=1)
    assert proof.equal, proof.differences
    assert proof.compared > 5


@pytest.mark.parametrize("rows", [(1,), (5,), (2, 3)])
def test_columns_of_zeros_are_left_out(rows: tuple[int, ...]) -> None:
    x = torch.randn(*rows, 64, dtype=torch.float64).relu()
    x[..., ::3] = 0
    given = [x.requires_grad_()]
    given += [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((10, 64), (10,))]
    lean, plain = gradients(relu_sparse_linear, given), gradients(F.linear, given)
    for a, b in zip([lean[0], *lean[1]], [plain[0], *plain[1]], strict=True):
        assert a is not None
        assert b is not None
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)
    small = [t.detach().requires_grad_() for t in (x[..., :8], given[1][:, :8], given[2])]
    assert torch.autograd.gradgradcheck(relu_sparse_linear, small)
    assert relu_sparse_linear(x * 0, *given[1:]).eq(given[2]).all()


def test_a_wrong_block_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = _blocked._one_block

    def wrong(*args: Any) -> None:
        real(*args)
        if (args[4].start, args[5].start) == (16, 32):
            args[3][args[4], args[5]][0, 0] *= 1.01

    monkeypatch.setattr(_blocked, "_one_block", wrong)
    with pytest.raises(AssertionError):
        assert_no_worse(lambda *a: blocked_linear(*a, block=16), F.linear, parts(layer(64, 64), 64))
