"""``Linear`` with its activation in one node, against ``torch.nn.Linear`` and the activation."""

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
from gradstow.layers._linear import Linear
from gradstow.layers._saved import saved_bytes
from gradstow.layers.ops._epilogue import Activation
from gradstow.layers.ops._linear import linear
from numerics.layers.judge import assert_no_worse, assert_same_state, gradients
from numerics.layers.torch_samples import module_samples, op_samples

ACTIVATIONS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    Activation("hardtanh", -0.3, 0.4): lambda x: F.hardtanh(x, -0.3, 0.4),
    "leaky_relu": F.leaky_relu,
    Activation("leaky_relu", 0.3): lambda x: F.leaky_relu(x, 0.3),
    Activation("leaky_relu", -0.3): lambda x: F.leaky_relu(x, -0.3),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "elu": F.elu,
    Activation("elu", 0.5): lambda x: F.elu(x, 0.5),
    None: lambda x: x,
}
FROM_BITS = ["relu", "relu6", Activation("hardtanh", -0.3, 0.4), "leaky_relu", Activation("leaky_relu", -0.3)]
WAYS = [(act, "output") for act in ACTIVATIONS] + [(act, "mask") for act in FROM_BITS]
SHAPES = [(6,), (5, 6), (2, 3, 6), (2, 2, 2, 6), (0, 6), (2, 0, 6)]


def parts(dtype: torch.dtype = torch.float32, shape: Any = (4, 6), out: int = 7, seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (shape, (out, shape[-1]), (out,))
    made = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    return [x.requires_grad_() for x in made]


def both(act: Any, saves: str = "output") -> tuple[Any, Any]:
    return (lambda *args: linear(*args, act, saves)), lambda *args: ACTIVATIONS[act](F.linear(*args))


def assert_equal(lean: Any, plain: Any, inputs: list[Any]) -> None:
    found, right = gradients(lean, inputs), gradients(plain, inputs)
    for one, two in zip([found[0], *found[1]], [right[0], *right[1]], strict=True):
        assert (one is None) == (two is None)
        if one is not None and two is not None:
            assert one.dtype == two.dtype
            assert torch.equal(one, two), float((one - two).abs().max())


@pytest.mark.parametrize(("act", "saves"), WAYS)
def test_bit_equal(act: Any, saves: str) -> None:
    for shape in SHAPES:
        assert_equal(*both(act, saves), parts(shape=shape))
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert_equal(*both(act, saves), parts(dtype))
    x, weight, bias = parts(shape=(6, 4))
    assert_equal(*both(act, saves), [x, weight.detach().t().contiguous().t().requires_grad_(), None])


@pytest.mark.parametrize(("act", "saves"), WAYS)
def test_strides(act: Any, saves: str) -> None:
    x, weight, bias = parts(shape=(3, 4, 6))
    for strange in (x.transpose(0, 1), x[:, ::2], x[:1].expand(5, 4, 6), x.detach().flip(0)):
        for b in (bias, None):
            assert_no_worse(*both(act, saves), [strange, weight, b])
    y = linear(x, weight, bias, act, saves)
    expected = ACTIVATIONS[act](F.linear(x, weight, bias))
    found = torch.autograd.grad(y.sum(), (x, weight, bias))  # an expanded gradient
    right = torch.autograd.grad(expected.sum(), (x, weight, bias))
    for one, two in zip(found, right, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize(("act", "saves"), WAYS)
def test_gradcheck(act: Any, saves: str) -> None:
    lean, _ = both(act, saves)
    for shape in ((3, 2), (2, 1, 2), (0, 2)):
        inputs = parts(torch.float64, shape, out=3, seed=3)
        assert torch.autograd.gradcheck(lean, inputs)
        assert torch.autograd.gradgradcheck(lean, inputs)
    x, weight, bias = parts(torch.float64, (3, 2), out=3, seed=3)
    assert torch.autograd.gradgradcheck(lean, (x, weight.detach(), bias))
    assert torch.autograd.gradgradcheck(lean, (x.detach(), weight, None))


@pytest.mark.parametrize("act", ["tanh", "gelu"])
def test_a_weight_used_twice_has_one_gradient_in_each_order(act: str) -> None:
    """A backward that runs the forward again must not walk on, to the weight's earlier use."""
    x, weight, bias = parts(torch.float64, (3, 4), out=4)
    inputs = (x, weight, bias)
    twice = linear(linear(*inputs, act), weight, bias, act)
    plain = ACTIVATIONS[act](F.linear(ACTIVATIONS[act](F.linear(*inputs)), weight, bias))
    found = torch.autograd.grad(twice.square().sum(), inputs, create_graph=True)
    for one, two in zip(found, torch.autograd.grad(plain.square().sum(), inputs), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_used_twice_under_autocast_it_is_torchs_without_its_cache(kind: str) -> None:
    """torch's cache adds the gradients of both uses up in the short type; here each is cast to the parameter's."""
    torch.manual_seed(0)
    module = nn.Linear(8, 8) if kind == "linear" else nn.Conv2d(8, 8, 3, padding=1)
    original = nn.Sequential(module, nn.Tanh())
    lean = copy.deepcopy(original)
    gs.layers.convert(lean)
    x = torch.randn(4, 8) if kind == "linear" else torch.randn(4, 8, 5, 5)

    def twice(model: nn.Module, cache: bool) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            output = model(model(x))
        return list(torch.autograd.grad(output.float().square().sum(), list(model.parameters())))

    for cache in (False, True):
        assert all(map(torch.equal, twice(lean, cache), twice(original, False)))
    assert not all(map(torch.equal, twice(original, True), twice(original, False)))


@pytest.mark.parametrize("saves", ["output", "mask"])
def test_special_numbers(saves: str) -> None:
    for act in FROM_BITS:
        weight = torch.eye(6).requires_grad_()
        x = torch.tensor([[float("nan"), 0.0, -0.0, 1.0, -1.0, 6.0]], requires_grad=True)
        found = torch.autograd.grad(linear(x, weight, None, act, saves)[0, 1:].sum(), weight)[0][1:]
        right = torch.autograd.grad(ACTIVATIONS[act](F.linear(x, weight))[0, 1:].sum(), weight)[0][1:]
        assert torch.equal(found.isnan(), right.isnan())
        assert torch.equal(found.nan_to_num(), right.nan_to_num())


def test_saved_bytes() -> None:
    """The input where the weight trains, the output or its bits; nothing else, and never a copy of the weight."""
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        for shape, rows in (((8, 6), 8), ((2, 4, 6), 8)):
            x, weight, bias = parts(dtype, shape, out=5)
            x_bytes, y_bytes, bits = rows * 6 * size, rows * 5 * size, -(-rows * 5 // 8)
            known = (weight, bias)

            def count(act: Any, saves: str = "output", inputs: Any = (x, weight, bias), known: Any = known) -> int:
                return saved_bytes(lambda: linear(*inputs, act, saves), known)

            assert count(None) == x_bytes
            assert count("relu") == x_bytes + y_bytes
            assert count("relu", "mask") == x_bytes + bits
            assert count("leaky_relu", "mask") == x_bytes + bits
            assert count("gelu") == count("silu") == x_bytes
            assert (
                saved_bytes(lambda inputs=(x, weight, bias): F.gelu(F.linear(*inputs)), known) == x_bytes + y_bytes
            )  # torch
            frozen = (x, weight.detach(), bias)
            assert count("relu", inputs=frozen, known=frozen[1:]) == y_bytes
            assert count("relu", "mask", inputs=frozen, known=frozen[1:]) == bits
            only_bias = (x.detach(), weight.detach(), bias)
            assert saved_bytes(lambda only_bias=only_bias: linear(*only_bias, "relu", "mask")) == bits


def test_autocast_keeps_no_copy_of_the_weight() -> None:
    for act, saves in WAYS:
        for shape in ((8, 6), (2, 4, 6)):
            with torch.autocast("cpu", torch.bfloat16):
                assert_equal(*both(act, saves), parts(shape=shape))
    x, weight, bias = parts(torch.bfloat16)
    weight, bias = weight.detach().float().requires_grad_(), bias.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        assert saved_bytes(lambda: linear(x, weight, bias), (x, weight, bias)) == 0
        assert saved_bytes(lambda: F.linear(x, weight, bias), (x, weight, bias)) == 2 * weight.numel()
        y = linear(x, weight, bias, "gelu")
        double = parts(torch.float64)
        assert linear(*double, "relu").dtype == F.linear(*double).dtype == torch.float64
    inside = linear(*parts(), "gelu")
    with torch.autocast("cpu", torch.bfloat16):  # a backward under autocast of a forward without
        inside.sum().backward()
    assert y.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("act", "saves"), [("relu", "output"), ("leaky_relu", "mask"), ("relu", "mask"), ("gelu", "output")]
)
def test_compiled(act: Any, saves: str) -> None:
    torch._dynamo.reset()
    lean, plain = both(act, saves)
    compiled = torch.compile(lean, backend="aot_eager", fullgraph=True)
    for freeze in (None, 1):
        inputs = parts(shape=(2, 3, 6))
        if freeze is not None:
            inputs[freeze].requires_grad_(False)
        assert_equal(compiled, plain, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(compiled, plain, parts())


@pytest.mark.parametrize(("act", "saves"), [(None, "output"), ("relu", "output"), ("relu", "mask"), ("silu", "output")])
def test_torchs_sample_inputs(act: Any, saves: str) -> None:
    lean, plain = both(act, saves)
    count = 0
    for dtype in (torch.float32, torch.bfloat16):
        for sample in op_samples("nn.functional.linear", dtype):
            weight, *bias = sample.args
            inputs = [sample.input, weight, *(bias or [sample.kwargs.get("bias")])]
            assert_no_worse(lean, plain, inputs)
            count += 1
    assert count > 10


def test_torchs_module_inputs() -> None:
    count = 0
    for given in module_samples(nn.Linear):
        made = given.constructor_input
        original, lean = nn.Linear(*made.args, **made.kwargs), Linear(*made.args, **made.kwargs)
        assert_same_state(lean, original)
        (x,) = (*given.forward_input.args, *given.forward_input.kwargs.values())
        assert torch.equal(lean(x), original(x))
        lean.activation = "relu"
        found, right = gradients(lean, [x]), gradients(lambda x, m=original: m(x).relu(), [x])
        assert torch.equal(found[0], right[0])
        torch.testing.assert_close(found[1], right[1])
        count += 1
    assert count > 2


def test_a_torch_module_is_converted_by_its_class_alone() -> None:
    module = nn.Linear(6, 7)
    original = copy.deepcopy(module)
    called: list[int] = []
    module.register_forward_hook(lambda *_: called.append(1))
    module.__class__ = Linear
    x = torch.randn(3, 6, requires_grad=True)
    assert torch.equal(module(x), original(x))
    module.activation = "gelu"
    assert torch.equal(module(x), F.gelu(original(x)))
    assert called == [1, 1]
    assert "activation=gelu" in repr(module)
    module._forward_hooks.clear()
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), module(x))
        assert type(other) is Linear
    module.eval()
    with torch.no_grad():
        assert torch.equal(module(x), F.gelu(original(x)))


def test_transforms_and_changes_in_place_work_as_in_torch() -> None:
    x, weight, bias = parts(torch.float64, (2, 3, 6))
    lean, plain = both("gelu")
    found = torch.func.grad(lambda w: lean(x, w, bias).sum())(weight)
    torch.testing.assert_close(found, torch.func.grad(lambda w: plain(x, w, bias).sum())(weight))
    torch.testing.assert_close(torch.vmap(lambda row: lean(row, weight, bias))(x), plain(x, weight, bias))
    for derivative in torch.func.jvp(lambda w: lean(x, w, bias), (weight,), (torch.ones_like(weight),)):
        assert derivative.shape == (2, 3, 7)
    y = lean(x, weight, bias)
    y.mul_(2)  # gelu does not keep its output
    torch.testing.assert_close(
        torch.autograd.grad(y.sum(), x)[0], 2 * torch.autograd.grad(plain(x, weight, bias).sum(), x)[0]
    )
    y = linear(x, weight, bias, "relu").mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_errors() -> None:
    with pytest.raises(gs.errors.PolicyError, match=r"'rleu' does not exist. Known are .*relu6"):
        Linear(2, 3, activation="rleu")
    with pytest.raises(gs.errors.PolicyError, match="one bit does not give the gradient of gelu"):
        Linear(2, 3, activation="gelu", saves="mask")
    with pytest.raises(gs.errors.PolicyError, match="saves='bits' does not exist"):
        linear(*parts(), "relu", "bits")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(parts(shape=(4, 5))[0], *parts()[1:], "relu")


@pytest.mark.usefixtures("guessed_costs")
def test_stow_trains_it_equally() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        Linear(64, 128, activation="relu"),
        Linear(128, 128, activation="leaky_relu", saves="mask"),
        Linear(128, 128, activation="gelu"),
        Linear(128, 8),
    )
    batch = torch.randn(256, 64)
    for budget in ("100%", "90%"):
        proof = gs.verify(model, batch, loss=lambda y, _: y.square().mean(), budget=budget, steps=2, rounds=1)
        assert proof.equal, proof
        assert proof.compared > 8


def test_the_comparison_can_fail() -> None:
    def wrong(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return linear(x, weight, bias, "relu") + 0 * weight.sum() + 1e-3 * (x.sum() - x.sum().detach())

    with pytest.raises(AssertionError):
        assert_equal(wrong, both("relu")[1], parts())
    with pytest.raises(AssertionError):
        assert_no_worse(wrong, both("relu")[1], parts())
