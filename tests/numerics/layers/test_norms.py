"""LayerNorm, RMSNorm and GroupNorm against torch's: numbers, kept bytes, sums in float32, and what they work with."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradstow as gs
from gradstow.errors import GradstowError
from gradstow.layers import _norms
from gradstow.layers._saved import saved_bytes, saved_storages
from gradstow.layers.ops import _group_norm, _layer_norm
from gradstow.layers.ops._group_norm import as_torch_reads, group_norm
from gradstow.layers.ops._layer_norm import layer_norm
from gradstow.layers.ops._rms_norm import rms_norm
from numerics.layers.judge import assert_no_worse, assert_same_state, error, gradients
from numerics.layers.torch_samples import module_samples, op_samples

Run = Callable[..., torch.Tensor]
KINDS = ["layer", "rms", "group"]
SAVES = ["input", "output"]
SHORT = [torch.bfloat16, torch.float16]
LEAN = {nn.LayerNorm: _norms.LayerNorm, nn.RMSNorm: _norms.RMSNorm, nn.GroupNorm: _norms.GroupNorm}


def both(kind: str, width: int, saves: str = "input") -> tuple[Run, Run]:
    """The lean one and the original, of an input and the parameters."""
    if kind == "layer":
        return (
            lambda x, w=None, b=None: layer_norm(x, (width,), w, b, saves=saves),
            lambda x, w=None, b=None: F.layer_norm(x, (width,), w, b),
        )
    if kind == "rms":
        return lambda x, w=None: rms_norm(x, (width,), w, saves=saves), lambda x, w=None: F.rms_norm(x, (width,), w)
    return (
        lambda x, w=None, b=None: group_norm(x, 2, w, b, saves=saves),
        lambda x, w=None, b=None: F.group_norm(x, 2, w, b),
    )


def parts(kind: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    width = shape[1] if kind == "group" else shape[-1]
    weight, bias = 1 + torch.randn(2, width, generator=made, dtype=torch.float64) / 10
    given = [torch.randn(shape, generator=made, dtype=torch.float64), weight, bias][: 2 if kind == "rms" else 3]
    return [x.to(dtype).requires_grad_() for x in given]


def module_of(kind: str, width: int = 6, **options: Any) -> nn.Module:
    if kind == "group":
        return nn.GroupNorm(2, width, **options)
    return (nn.LayerNorm if kind == "layer" else nn.RMSNorm)(width, **options)


def lean_of(module: nn.Module, saves: str = "input") -> Any:
    found = copy.deepcopy(module)
    found.__class__ = LEAN[type(module)]
    found.saves = saves  # type: ignore[assignment]
    return found


def strided(x: torch.Tensor, how: str) -> torch.Tensor:
    if how == "channels_last":
        return x.to(memory_format=torch.channels_last) if x.dim() == 4 else x
    if how == "expanded":
        return x[:1].expand(x.shape)
    if how == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return x.repeat_interleave(2, 0)[::2] if how == "every second" else x


@pytest.mark.parametrize("how", ["plain", "channels_last", "expanded", "transposed", "every second"])
@pytest.mark.parametrize("shape", [(3, 6), (4, 5, 6), (2, 6, 3, 6)])
@pytest.mark.parametrize("kind", KINDS)
def test_float32_is_torchs(kind: str, shape: tuple[int, ...], how: str) -> None:
    lean, original = both(kind, shape[-1])
    if kind == "group":
        shape = (shape[0], 6, *shape[2:])
    inputs = parts(kind, shape)
    inputs[0] = strided(inputs[0].detach(), how).requires_grad_()
    one, two = gradients(lean, inputs), gradients(original, inputs)
    assert torch.equal(one[0], two[0])
    assert one[0].stride() == two[0].stride()
    if kind != "rms":
        assert all(torch.equal(a, b) for a, b in zip(one[1], two[1], strict=True))  # type: ignore[arg-type]
    assert_no_worse(lean, original, inputs)


@pytest.mark.parametrize("saves", SAVES)
@pytest.mark.parametrize("shape", [(0, 4), (3, 4), (0, 3, 4), (2, 2, 2, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind: str, shape: tuple[int, ...], saves: str) -> None:
    if kind == "group":
        shape = (shape[0], 4, *shape[2:])
    lean, _ = both(kind, shape[-1], saves)
    inputs = parts(kind, shape, torch.float64)
    assert torch.autograd.gradcheck(lean, inputs)
    assert torch.autograd.gradcheck(lean, inputs[:1])
    if shape[0] and saves == "input":
        assert torch.autograd.gradgradcheck(lean, inputs, fast_mode=True)


def test_several_normalized_dimensions() -> None:
    x, w, b = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 4, 5), (4, 5), (4, 5)))
    for saves in SAVES:
        assert torch.autograd.gradcheck(lambda x, w, b, s=saves: layer_norm(x, (4, 5), w, b, saves=s), (x, w, b))
        assert torch.autograd.gradcheck(lambda x, w, s=saves: rms_norm(x, (4, 5), w, saves=s), (x, w))


@pytest.mark.parametrize("saves", SAVES)
@pytest.mark.parametrize("dtype", [torch.float32, *SHORT])
@pytest.mark.parametrize("kind", KINDS)
def test_no_worse_than_torch(kind: str, dtype: torch.dtype, saves: str) -> None:
    lean, original = both(kind, 48, saves)
    inputs = parts(kind, (64, 48, 5) if kind == "group" else (64, 5, 48), dtype)
    assert torch.equal(lean(*inputs), original(*inputs))
    assert_no_worse(lean, original, inputs)


@pytest.mark.parametrize("dtype", SHORT)
def test_sums_are_float32(dtype: torch.dtype) -> None:
    """The issue's bar: 16,384 tokens of width 256."""
    inputs = parts("layer", (16384, 256), dtype)
    lean, original = both("layer", 256)
    along = torch.randn(16384, 256, generator=torch.Generator().manual_seed(1)).to(dtype)

    def sums(run: Run, kind: torch.dtype) -> Any:
        given = [x.detach().to(kind).requires_grad_() for x in inputs]
        return torch.autograd.grad(run(*given), given[1:], along.to(kind))

    right, wide = sums(original, torch.float64), sums(original, torch.float32)
    for found, torchs, exact, best in zip(sums(lean, dtype), sums(original, dtype), right, wide, strict=True):
        assert error(found, exact) <= error(torchs, exact) / 2
        assert error(found, exact) <= 1.01 * error(best.to(dtype), exact)  # only the last rounding is left


@pytest.mark.parametrize("kind", KINDS)
def test_many_chunks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lean, original = both(kind, 48)
    inputs = parts(kind, (64, 48, 5) if kind == "group" else (64, 5, 48), torch.bfloat16)
    monkeypatch.setattr(_layer_norm, "_CHUNK", {"cpu": 700})
    assert_no_worse(lean, original, inputs)
    assert_no_worse(both(kind, 48, "output")[0], original, inputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *SHORT])
def test_float32_copies_where_the_kernel_has_short_sums(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What GroupNorm does for short types on CUDA."""
    monkeypatch.setattr(_layer_norm, "_CHUNK", {"cpu": 700})
    x, w, b = parts("group", (5, 48, 7), dtype)
    y, mean, rstd = torch.ops.gradstow.group_norm_wide(x, 2, w, b, 1e-5, x.dtype)
    assert torch.equal(y, F.group_norm(x, 2, w, b))
    assert mean.dtype == rstd.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    g = torch.randn(x.shape).to(dtype)
    found = _group_norm.group_norm_backward(g, x, 2, mean, rstd, w, b, dtype, [True] * 3)
    exact = [t.detach().double().requires_grad_() for t in (x, w, b)]
    right = torch.autograd.grad(F.group_norm(exact[0], 2, *exact[1:]), exact, g.double())
    plain = torch.autograd.grad(F.group_norm(x, 2, w, b), (x, w, b), g)
    for one, two, three in zip(found, plain, right, strict=True):
        assert one.dtype == dtype
        assert error(one, three) <= 2 * error(two, three) + 1e-15


def kept(run: Callable[[], torch.Tensor], known: list[torch.Tensor]) -> list[int]:
    return sorted(saved_storages(run, known).values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *SHORT])
@pytest.mark.parametrize("kind", KINDS)
def test_saved_bytes(kind: str, dtype: torch.dtype) -> None:
    inputs = parts(kind, (8, 6, 10, 6), dtype)
    rows = 8 * 2 if kind == "group" else 8 * 6 * 10
    statistic = rows * (8 if dtype == torch.float64 else 4)
    for some in (inputs, inputs[:1]):
        found = kept(lambda some=some: both(kind, 6)[0](*some), inputs)
        assert found == [statistic] * (1 if kind == "rms" else 2)
        y = both(kind, 6, "output")[0](*some)
        found = kept(lambda some=some: both(kind, 6, "output")[0](*some), inputs)
        assert found == sorted([statistic, y.numel() * y.element_size()])


def test_output_that_the_next_layer_keeps_is_kept_once() -> None:
    x, w, b = parts("layer", (8, 6))
    weight = torch.randn(4, 6, requires_grad=True)
    assert saved_bytes(lambda: F.linear(layer_norm(x, (6,), w, b, saves="output"), weight), [w, b, weight]) == 8 * (
        24 + 4
    )
    assert saved_bytes(lambda: F.linear(layer_norm(x, (6,), w, b), weight), [w, b, weight]) == 8 * (24 + 24 + 8)


def test_rms_norm_keeps_less_than_torch() -> None:
    x, w = parts("rms", (8, 6), torch.bfloat16)
    lean, original = (saved_bytes(lambda run=run: run(x, w), [w]) for run in both("rms", 6))
    assert lean == 8 * (12 + 4)
    assert original > 3 * lean


@pytest.mark.parametrize("kind", KINDS)
def test_only_gradients_that_are_needed(kind: str) -> None:
    for dtype, saves in ((torch.float32, "input"), (torch.bfloat16, "input"), (torch.float32, "output")):
        lean, _ = both(kind, 6, saves)
        inputs = parts(kind, (4, 6), dtype)
        whole = gradients(lean, inputs)[1]
        for alone in range(len(inputs)):
            some = [x.detach().requires_grad_(i == alone) for i, x in enumerate(inputs)]
            found = gradients(lean, some)[1]
            assert [f is not None for f in found] == [i == alone for i in range(len(inputs))]
            assert torch.equal(found[alone], whole[alone])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("kind", KINDS)
def test_autocast_and_mixed_types(kind: str, dtype: torch.dtype) -> None:
    lean, original = both(kind, 6)
    inputs = parts(kind, (4, 6))
    with torch.autocast("cpu", dtype):
        assert torch.equal(lean(*inputs), original(*inputs))
        assert_no_worse(lean, original, inputs)
    mixed = [inputs[0].detach().to(dtype).requires_grad_(), *inputs[1:]]
    with torch.autocast("cpu", dtype):
        assert_no_worse(lean, original, mixed)
    assert [g.dtype for g in gradients(lean, mixed)[1]] == [x.dtype for x in mixed]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("dtype", "saves"), [(torch.float32, "input"), (torch.float32, "output"), (torch.bfloat16, "input")]
)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled(kind: str, saves: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    lean, _ = both(kind, 6, saves)
    compiled = torch.compile(lambda *given: lean(*given) * 2, backend="aot_eager", fullgraph=True)
    for batch in (4, 7):  # the second one is compiled for any batch
        inputs = parts(kind, (batch, 6, 5, 6), dtype)
        one, two = gradients(compiled, inputs), gradients(lambda *given: lean(*given) * 2, inputs)
        assert torch.equal(one[0], two[0])
        assert all(torch.equal(a, b) for a, b in zip(one[1], two[1], strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("saves", SAVES)
def test_stowed(saves: str) -> None:
    torch.manual_seed(0)
    plain = [
        nn.Linear(16, 24),
        nn.LayerNorm(24),
        nn.ReLU(),
        nn.GroupNorm(4, 24),
        nn.ReLU(),
        nn.RMSNorm(24),
        nn.Linear(24, 4),
    ]
    model = nn.Sequential(*(lean_of(m, saves) if type(m) in LEAN else m for m in plain))
    proof = gs.verify(model, torch.randn(64, 16), loss=lambda y, _: y.square().mean(), budget="90%", steps=2, rounds=1)
    assert proof.ok, proof


@pytest.mark.parametrize("kind", KINDS)
def test_module(kind: str) -> None:
    original = module_of(kind)
    lean = lean_of(original)
    assert_same_state(lean, original)
    x = torch.randn(4, 6, requires_grad=True)
    expected = original(x)
    for module in (lean, copy.deepcopy(lean), pickle.loads(pickle.dumps(lean))):
        assert torch.equal(module(x), expected)
        assert module(x).grad_fn.name().startswith("_")  # a node of our own
        with torch.no_grad():
            assert torch.equal(module(x), expected)
        assert module.eval()(x.detach().requires_grad_(False)).shape == x.shape
    assert type(module_of(kind)) in LEAN
    assert isinstance(lean, type(original))


@pytest.mark.parametrize("kind", list(LEAN))
def test_torchs_module_samples(kind: type) -> None:
    count = 0
    for sample in module_samples(kind):
        if sample.forward_input is None:
            continue
        original = kind(*sample.constructor_input.args, **sample.constructor_input.kwargs)
        lean = lean_of(original)
        names = [name for name, _ in original.named_parameters()]

        def run(module: nn.Module, names: list[str] = names) -> Run:
            return lambda x, *given: torch.func.functional_call(module, dict(zip(names, given, strict=True)), (x,))

        inputs = [*sample.forward_input.args, *original.parameters()]
        assert_no_worse(run(lean), run(original), inputs)
        count += 1
    assert count > 2


@pytest.mark.parametrize(
    ("name", "lean"), [("layer_norm", layer_norm), ("rms_norm", rms_norm), ("group_norm", group_norm)]
)
def test_torchs_op_samples(name: str, lean: Any) -> None:
    found = list(op_samples(f"nn.functional.{name}", torch.float32))
    for sample in found:
        given = [sample.input, *sample.args]
        for run in (lean, getattr(F, name)):
            assert run(*given, **sample.kwargs).shape == sample.input.shape
        places = [k for k, v in sample.kwargs.items() if isinstance(v, torch.Tensor)]
        tensors = [*given, *(sample.kwargs[k] for k in places)]

        def call(run: Any, *values: Any, n: int = len(given), places: Any = places, kwargs: Any = sample.kwargs) -> Any:
            return run(*values[:n], **{**kwargs, **dict(zip(places, values[n:], strict=True))})

        assert_no_worse(lambda *v, c=call: c(lean, *v), lambda *v, c=call: c(getattr(F, name), *v), tensors)
    assert len(found) > 3


def test_errors() -> None:
    x, w, b = parts("layer", (4, 6))
    with pytest.raises(GradstowError, match="cannot save 'both'"):
        layer_norm(x, (6,), w, b, saves="both")
    zero = w.detach().clone().requires_grad_()
    with torch.no_grad():
        zero[2] = 0
    for kind in KINDS:
        assert torch.isfinite(both(kind, 6)[0](x, zero)).all()
        with pytest.raises(GradstowError, match="1 of 6 weights are 0") as caught:
            both(kind, 6, "output")[0](x, zero)
        assert isinstance(caught.value, ValueError)
    layer_norm(x, (6,), w, 1000 * w.detach(), saves="output")
    with pytest.raises(GradstowError, match="1024 times as large"):
        layer_norm(x, (6,), w, 1100 * w.detach(), saves="output")
    y = layer_norm(x, (6,), w, b, saves="output")
    with pytest.raises(GradstowError, match="cannot be differentiated again"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(ValueError, match="Expected more than 1 value"):
        group_norm(torch.randn(1, 2, requires_grad=True), 2)
    with pytest.raises(RuntimeError, match="divisible"):
        group_norm(torch.randn(2, 5, 3, requires_grad=True), 2)


def test_error_of_the_inverted_output_is_bounded() -> None:
    """``u |output / weight|``, as the docstring states."""
    x, w, b = parts("layer", (200, 64), torch.float32)
    y = F.layer_norm(x, (64,), w, 100 * b).detach()
    exact = F.layer_norm(x.double(), (64,))
    found = (y.double() - 100 * b.double()) / w.double()
    bound = 2.0**-24 * (y.double() / w.double()).abs()
    assert ((found - exact).abs() <= 3 * bound + 1e-6).all()  # the output's own error is more than its rounding


@pytest.mark.parametrize("size", [(2, 6, 4, 5), (2, 1, 4, 5), (2, 6, 1, 1), (1, 6, 4, 5), (2, 6, 3, 4, 5)])
def test_layouts_are_seen_as_torch_sees_them(size: tuple[int, ...]) -> None:
    channels_last = torch.channels_last if len(size) == 4 else torch.channels_last_3d
    wide = torch.randn(size[0] * 2, *size[1:])
    for x in (wide[::2], wide.to(memory_format=channels_last)[::2], wide.to(memory_format=channels_last)[: size[0]]):
        assert (
            as_torch_reads(x).stride()
            == x.contiguous(memory_format=torch._prims_common.suggest_memory_format(x)).stride()
        )


def test_the_comparison_can_fail() -> None:
    inputs = parts("layer", (4, 6))
    lean, original = both("layer", 6)

    def wrong(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return lean(x, w, b) + 1e-4 * x

    with pytest.raises(AssertionError):
        assert_no_worse(wrong, original, inputs)
    assert kept(lambda: lean(*inputs), []) != kept(lambda: lean(*inputs), inputs)
