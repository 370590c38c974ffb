"""``Conv1d``, ``Conv2d`` and ``Conv3d`` with their activation in one node, against torch's two."""

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
from gradstow.layers._conv import Conv1d, Conv2d, Conv3d
from gradstow.layers._saved import saved_bytes
from gradstow.layers.ops._conv import convolution
from gradstow.layers.ops._epilogue import Activation
from numerics.layers.judge import assert_no_worse, assert_same_state, gradients
from numerics.layers.torch_samples import module_samples, op_samples

LEAN: dict[int, Any] = {1: Conv1d, 2: Conv2d, 3: Conv3d}
TORCH: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
PLAIN: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
ACTIVATIONS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda x: x,
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "relu6": F.relu6,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "silu": F.silu,
    Activation("hardtanh", -0.3, 0.4): lambda x: F.hardtanh(x, -0.3, 0.4),
}
WAYS = [(act, "output") for act in ACTIVATIONS] + [(act, "mask") for act in ("relu", "leaky_relu", "relu6")]
GEOMETRIES: list[dict[str, Any]] = [
    {},
    {"stride": 2, "padding": 1},
    {"padding": "same", "dilation": 2},
    {"padding": "valid"},
    {"groups": 2, "padding": 1, "bias": False},
    {"padding": 1, "padding_mode": "circular"},
    {"padding": 1, "padding_mode": "reflect", "stride": 2},
    {"padding": "same", "padding_mode": "replicate"},
    {"kernel_size": 2, "padding": "same"},
    {"kernel_size": 1},
]


def pair(n: int, act: Any = None, saves: str = "output", channels: int = 4, **options: Any) -> tuple[Any, Any]:
    """A lean module and torch's, with the same parameters."""
    options = {"kernel_size": 3} | options
    torch.manual_seed(0)
    original = TORCH[n](channels, 6, **options)
    lean = LEAN[n](channels, 6, activation=act, saves=saves, **options)
    lean.load_state_dict(original.state_dict())
    return lean, original


def images(n: int, batch: tuple[int, ...] = (2,), channels: int = 4, size: int = 5, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*batch, channels, *(size + i for i in range(n)), generator=generator).requires_grad_()


def step(run: Any, module: Any, x: torch.Tensor) -> list[torch.Tensor | None]:
    """Output and every gradient, for one output gradient."""
    module.zero_grad()
    output, (for_x,) = gradients(run, [x])
    return [output, for_x, *(p.grad for p in module.parameters())]


def assert_equal(lean: Any, original: Any, x: torch.Tensor, act: Any = None) -> None:
    found = step(lean, lean, x)
    right = step(lambda x: ACTIVATIONS[act](original(x)), original, x)
    for index, (one, two) in enumerate(zip(found, right, strict=True)):
        assert (one is None) == (two is None), index
        if one is not None and two is not None:
            assert one.dtype == two.dtype
            assert one.stride() == two.stride() or one.numel() < 2, index
            assert torch.equal(one, two), (index, float((one - two).abs().max()))


@pytest.mark.parametrize(("act", "saves"), WAYS)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_bit_equal(n: int, act: Any, saves: str) -> None:
    for options in GEOMETRIES:
        lean, original = pair(n, act, saves, **options)
        for batch in ((2,), ()):
            assert_equal(lean, original, images(n, batch), act)
    lean, original = pair(n, act, saves)
    for dtype in (torch.float64, torch.bfloat16):
        assert_equal(copy.deepcopy(lean).to(dtype), copy.deepcopy(original).to(dtype), images(n).to(dtype), act)


@pytest.mark.parametrize(("act", "saves"), WAYS)
def test_layouts_and_empty_batches(act: Any, saves: str) -> None:
    lean, original = pair(2, act, saves, padding=1)
    x = images(2, (4,), size=8)
    for strange in (
        x.contiguous(memory_format=torch.channels_last),
        x.transpose(2, 3),
        x[:, :, ::2, 1:],
        x[:1].expand(3, -1, -1, -1),
        x[:0],
    ):
        strange = strange.detach().requires_grad_()
        assert_equal(lean, original, strange, act)
        last = [copy.deepcopy(m).to(memory_format=torch.channels_last) for m in (lean, original)]
        assert_equal(*last, strange, act)


@pytest.mark.parametrize("frozen", [("weight",), ("weight", "bias"), ("bias",), ("input",), ("input", "weight")])
def test_frozen_parts(frozen: tuple[str, ...]) -> None:
    """Also the layout and the numbers of the input's gradient, which is made without the input."""
    for act, saves in WAYS:
        for options in ({}, {"groups": 2}, {"kernel_size": 1}, {"kernel_size": 2, "padding": "same"}):
            lean, original = pair(2, act, saves, **options)
            for module in (lean, original):
                for name in {"weight", "bias"} & set(frozen):
                    getattr(module, name).requires_grad_(False)
            base = images(2)
            for x in (base, base.to(memory_format=torch.channels_last), base.transpose(2, 3), base[:, :, 1:]):
                x = x.detach().requires_grad_("input" not in frozen)
                assert_equal(lean, original, x, act)


def test_saved_bytes() -> None:
    """The input where the weight trains, the output or its bits; nothing else, and never a copy of the weight."""
    for n in (1, 2, 3):
        x = images(n)
        x_bytes = 4 * x.numel()
        y = PLAIN[n](x, pair(n)[0].weight)
        y_bytes, bits = 4 * y.numel(), -(-y.numel() // 8)

        def count(act: Any, saves: str = "output", freeze: str = "", n: int = n, x: torch.Tensor = x) -> int:
            lean, _ = pair(n, act, saves)
            for name, parameter in lean.named_parameters():
                parameter.requires_grad_(name not in freeze)
            return saved_bytes(lambda: lean(x), lean.parameters())

        assert count(None) == x_bytes
        assert count("relu") == x_bytes + y_bytes
        assert count("relu", "mask") == count("leaky_relu", "mask") == x_bytes + bits
        assert count("gelu") == count("silu") == x_bytes
        assert count(None, freeze="weight bias") == 0
        original = pair(n)[1].requires_grad_(False)
        assert saved_bytes(lambda m=original, x=x: m(x), original.parameters()) == x_bytes  # torch keeps it for nothing
        assert count("relu", freeze="weight") == y_bytes
        assert count("relu", "mask", freeze="weight bias") == bits


@pytest.mark.parametrize(("act", "saves"), WAYS)
def test_autocast(act: Any, saves: str) -> None:
    lean, original = pair(2, act, saves, padding=1)
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(lean, original, images(2), act)
        assert_equal(lean, original, images(2).bfloat16(), act)
        assert_equal(copy.deepcopy(lean).double(), copy.deepcopy(original).double(), images(2).double(), act)
    x = images(2).detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        plain = saved_bytes(lambda: original(x), [*original.parameters(), x])
        mine = saved_bytes(lambda: lean(x), [*lean.parameters(), x])
    assert plain == 2 * original.weight.numel()  # a short copy of the weight
    output = 0 if act in ("gelu", "silu") or act is None else lean(x.float()).numel()
    assert mine == (-(-output // 8) if saves == "mask" or isinstance(act, Activation) else 2 * output)


@pytest.mark.parametrize(("act", "saves"), WAYS)
def test_gradcheck(act: Any, saves: str) -> None:
    def run(x: Any, weight: Any, bias: Any = None) -> torch.Tensor:
        return convolution(x, weight, bias, stride=2, padding=1, activation=act, saves=saves)

    for n, batch in ((1, (2,)), (2, ()), (1, (0,))):
        lean, _ = pair(n, channels=1, kernel_size=2)
        x, weight, bias = (t.detach().double().requires_grad_() for t in (images(n, batch, 1, 3), *lean.parameters()))
        assert torch.autograd.gradcheck(run, (x, weight[:2].detach().requires_grad_(), None))
        assert torch.autograd.gradgradcheck(run, (x, weight, bias))
        assert torch.autograd.gradgradcheck(run, (x, weight.detach(), bias))
        assert torch.autograd.gradgradcheck(run, (x.detach(), weight))


def test_a_weight_used_twice_has_one_gradient_in_each_order() -> None:
    lean = Conv2d(2, 2, 3, padding=1, activation="gelu").double()
    x = images(2, channels=2).double()
    parameters = list(lean.parameters())
    first = torch.autograd.grad(lean(lean(x)).square().sum(), parameters)
    again = torch.autograd.grad(lean(lean(x)).square().sum(), parameters, create_graph=True)
    for one, two in zip(first, again, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize(("act", "saves"), [(None, "output"), ("relu", "output"), ("relu", "mask"), ("gelu", "output")])
def test_compiled(act: Any, saves: str) -> None:
    torch._dynamo.reset()
    lean, original = pair(2, act, saves, padding="same", padding_mode="circular")
    compiled = torch.compile(lean, backend="aot_eager", fullgraph=True)
    assert_equal(compiled, original, images(2), act)
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(compiled, original, images(2), act)
    for module in (lean, original):
        module.weight.requires_grad_(False)
    assert_equal(compiled, original, images(2), act)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_torchs_sample_inputs(n: int) -> None:
    count = 0
    for act, saves in ((None, "output"), ("relu", "output"), ("relu", "mask"), ("silu", "output")):
        for sample in op_samples(f"nn.functional.conv{n}d", torch.float32):
            weight, *bias = sample.args
            inputs = [sample.input, weight, *(bias or [None])]

            def lean(*tensors: Any, sample: Any = sample, act: Any = act, saves: str = saves) -> torch.Tensor:
                return convolution(*tensors, **sample.kwargs, activation=act, saves=saves)

            def plain(*tensors: Any, sample: Any = sample, act: Any = act) -> torch.Tensor:
                return ACTIVATIONS[act](PLAIN[n](*tensors, **sample.kwargs))

            assert_no_worse(lean, plain, inputs)
            count += 1
    assert count > 10


@pytest.mark.parametrize("n", [1, 2, 3])
def test_torchs_module_inputs(n: int) -> None:
    count = 0
    for given in module_samples(TORCH[n]):
        made = given.constructor_input
        original, lean = TORCH[n](*made.args, **made.kwargs), LEAN[n](*made.args, **made.kwargs)
        assert_same_state(lean, original)
        (x,) = (*given.forward_input.args, *given.forward_input.kwargs.values())
        assert_equal(lean, original, x)
        lean.activation = "relu"
        assert_equal(lean, original, x, "relu")
        count += 1
    assert count >= 4


def test_a_torch_module_is_converted_by_its_class_alone() -> None:
    module = nn.Conv2d(4, 6, 3, padding=1)
    original = copy.deepcopy(module)
    called: list[int] = []
    module.register_forward_hook(lambda *_: called.append(1))
    module.__class__ = Conv2d
    x = images(2)
    assert torch.equal(module(x), original(x))
    module.activation = "relu"
    assert torch.equal(module(x), F.relu(original(x)))
    assert called == [1, 1]
    assert "activation=relu" in repr(module)
    module._forward_hooks.clear()
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), module(x))
        assert type(other) is Conv2d
    with torch.no_grad():
        assert torch.equal(module.eval()(x), F.relu(original(x)))
        assert module(x).grad_fn is None
    nn.utils.parametrizations.weight_norm(module)
    y = module(x)
    assert torch.equal(y, F.relu(F.conv2d(x, module.weight, module.bias, padding=1)))
    y.sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_transforms_run_torchs_own() -> None:
    lean, original = pair(2, "gelu")
    x = images(2)
    found = torch.func.grad(lambda x: lean(x).sum())(x)
    torch.testing.assert_close(found, torch.func.grad(lambda x: F.gelu(original(x)).sum())(x))
    torch.testing.assert_close(torch.vmap(lean)(x), lean(x))
    assert torch.func.jvp(lean, (x,), (torch.ones_like(x),))[1].shape == lean(x).shape


def test_errors() -> None:
    with pytest.raises(gs.errors.PolicyError, match="'rleu' does not exist"):
        Conv2d(2, 3, 1, activation="rleu")
    with pytest.raises(gs.errors.PolicyError, match="one bit does not give the gradient of tanh"):
        Conv1d(2, 3, 1, activation="tanh", saves="mask")
    lean, original = pair(2)
    for x in (images(2, (2, 2)), images(2, channels=5), images(2)[:, :, :1], images(2).long()):
        with pytest.raises(RuntimeError) as right:
            original(x)
        with pytest.raises(RuntimeError) as found:
            lean(x)
        assert str(found.value) == str(right.value)
    with pytest.raises(RuntimeError):
        lean(images(2).double())
    with pytest.raises(RuntimeError, match="padding='same' is not supported for strided"):
        convolution(images(2), lean.weight, stride=2, padding="same")


@pytest.mark.usefixtures("guessed_costs")
def test_stow_trains_it_equally() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        Conv2d(3, 8, 3, padding=1, activation="relu"),
        Conv2d(8, 8, 3, padding="same", padding_mode="circular", activation="leaky_relu", saves="mask"),
        Conv2d(8, 8, 3, activation="gelu"),
        nn.Flatten(),
        nn.Linear(8 * 10 * 10, 4),
    )
    model[0].requires_grad_(False)
    batch = torch.randn(4, 3, 12, 12)
    for wanted in ({"budget": "100%"}, {"policy": "recompute-all"}):
        proof = gs.verify(model, batch, loss=lambda y, _: y.square().mean(), steps=2, rounds=1, **wanted)
        assert proof.equal, proof
        assert proof.compared > 6


def test_the_comparison_can_fail() -> None:
    lean, original = pair(2, "relu")
    assert_equal(lean, original, images(2), "relu")
    with torch.no_grad():
        lean.bias.mul_(1 + 1e-6)
    with pytest.raises(AssertionError):
        assert_equal(lean, original, images(2), "relu")
