"""Lean activations are torch's own to the last bit, and keep exactly one bit per element."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import gradstow as gs
from gradstow.layers import _activations
from gradstow.layers._saved import saved_bytes
from gradstow.layers.ops import _masked, _smooth
from numerics.layers.exactly import Run, compiled_differences, differences, outcome
from numerics.layers.judge import assert_same_state
from numerics.layers.torch_samples import module_samples, op_samples

MASKED: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "relu": (_masked.relu, F.relu),
    "leaky_relu": (partial(_masked.leaky_relu, negative_slope=0.2), partial(F.leaky_relu, negative_slope=0.2)),
    "leaky_relu-0": (partial(_masked.leaky_relu, negative_slope=0.0), partial(F.leaky_relu, negative_slope=0.0)),
    "leaky_relu-neg": (partial(_masked.leaky_relu, negative_slope=-2), partial(F.leaky_relu, negative_slope=-2)),
    "hardtanh": (partial(_masked.hardtanh, min_val=-0.7, max_val=0.7), partial(F.hardtanh, min_val=-0.7, max_val=0.7)),
    "relu6": (partial(_masked.hardtanh, min_val=0.0, max_val=6.0), F.relu6),
    "hardsigmoid": (_masked.hardsigmoid, F.hardsigmoid),
}
CASES: dict[str, Run] = {
    "relu": _masked.relu,
    "relu-inplace": lambda x: _masked.relu(x * 1, inplace=True),
    "leaky_relu": _masked.leaky_relu,
    "leaky_relu-output": partial(_masked.leaky_relu, saves="output"),
    "hardtanh": _masked.hardtanh,
    "hardtanh-output": partial(_masked.hardtanh, saves="output"),
    "hardsigmoid-inplace": lambda x: _masked.hardsigmoid(x * 1, inplace=True),
    "logsigmoid": _smooth.logsigmoid,
    "softsign": _smooth.softsign,
}
MODULES = [
    (_activations.ReLU, nn.ReLU),
    (_activations.ReLU6, nn.ReLU6),
    (_activations.LeakyReLU, nn.LeakyReLU),
    (_activations.Hardtanh, nn.Hardtanh),
    (_activations.Hardsigmoid, nn.Hardsigmoid),
    (_activations.LogSigmoid, nn.LogSigmoid),
    (_activations.Softsign, nn.Softsign),
    (_activations.GELU, nn.GELU),
    (_activations.SiLU, nn.SiLU),
    (_activations.Mish, nn.Mish),
]
SPECIAL = [0.0, -0.0, 3.0, -3.0, 6.0, 0.7, -0.7, 1e-40, -1e-40, float("inf"), -float("inf"), float("nan")]


def inputs(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    values = {
        "contiguous": torch.randn(3, 5, 7, 9),
        "channels_last": torch.randn(3, 5, 7, 9).to(memory_format=torch.channels_last),
        "transposed": torch.randn(6, 7).t(),
        "several pieces": torch.randn((1 << 19) + 11),
        "special": torch.tensor(SPECIAL * 4),
        "empty": torch.randn(0, 3),
        "scalar": torch.randn(()),
    }
    return {name: (value * 3).to(dtype) for name, value in values.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MASKED)
def test_equal_to_torch(name: str, dtype: torch.dtype) -> None:
    lean, original = MASKED[name]
    ways: list[dict[str, Any]] = [{}] if name == "hardsigmoid" else [{"saves": "mask"}, {"saves": "output"}]
    for kind, x in inputs(dtype).items():
        for way in ways:
            assert differences(partial(lean, **way), original, x) == [], (kind, way)
            if name == "leaky_relu-neg":
                continue  # torch refuses it in place
            in_place = differences(
                lambda x, way=way: lean(x * 1, inplace=True, **way), lambda x: original(x * 1, inplace=True), x
            )
            assert in_place == [], (kind, way)


@pytest.mark.parametrize("name", ["relu", "leaky_relu", "relu6", "hardsigmoid"])
def test_strides(name: str) -> None:
    """Inputs and gradients that lie otherwise in memory, or share elements."""
    lean, original = MASKED[name]
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
            assert differences(lambda x, v=view: lean(v(x)), lambda x, v=view: original(v(x)), plain, along) == []


@pytest.mark.parametrize("name", CASES)
def test_gradcheck(name: str) -> None:
    torch.manual_seed(0)
    for shape in ((2, 3, 4), (0, 3), ()):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        assert gradcheck(CASES[name], (x,))
        assert gradgradcheck(CASES[name], (x,))


def test_second_derivatives_are_zeros_as_in_torch_not_missing() -> None:
    x = torch.randn(5, requires_grad=True)
    for run in (F.relu, _masked.relu, _masked.hardsigmoid, _masked.hardtanh):
        (first,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        assert torch.equal(torch.autograd.grad(first.sum(), x)[0], torch.zeros(5))


@pytest.mark.parametrize("n", [1, 7, 8, 9, 1000, (1 << 19) + 1])
def test_a_mask_is_one_bit_per_element(n: int) -> None:
    x = torch.randn(n, requires_grad=True)
    for lean, original in MASKED.values():
        assert saved_bytes(lambda f=lean: f(x), [x]) == -(-n // 8)
        if lean is not MASKED["leaky_relu-neg"][0]:  # torch's own, which its backward refuses
            assert saved_bytes(lambda f=lean: f(x * 1, inplace=True), [x]) == -(-n // 8)
        plain = saved_bytes(lambda f=original: f(x * 1))
        assert plain == 4 * n


def test_an_output_is_kept_instead_of_the_input() -> None:
    """Which costs nothing where the next layer keeps it too."""
    layer, x = nn.Linear(64, 8, bias=False), torch.randn(32, 64, requires_grad=True)
    known = [layer.weight, x]
    for run in (_masked.leaky_relu, _masked.hardtanh, _masked.relu):
        with_output = saved_bytes(lambda run=run: layer(run(x * 1, saves="output")), known)
        with_mask = saved_bytes(lambda run=run: layer(run(x * 1)), known)
        assert (with_output, with_mask) == (4 * x.numel(), 4 * x.numel() + x.numel() // 8)
    assert saved_bytes(lambda: layer(F.hardtanh(x * 1)), known) == 8 * x.numel()


def test_limits_that_a_short_type_rounds_need_the_mask() -> None:
    x = torch.tensor([5.0, 0.5, -5.0], dtype=torch.bfloat16, requires_grad=True)
    for limit, size in ((0.7, 1), (1.0, 6)):
        run = partial(_masked.hardtanh, min_val=-limit, max_val=limit, saves="output")
        assert saved_bytes(lambda run=run: run(x), [x]) == size
        assert differences(run, partial(F.hardtanh, min_val=-limit, max_val=limit), x) == []


def test_smooth_activations_keep_the_input_and_nothing_else() -> None:
    x = torch.randn(1000, requires_grad=True)
    kept = (F.gelu, partial(F.gelu, approximate="tanh"), F.silu, F.mish, F.softplus, F.hardswish)
    for run in (*kept, _smooth.logsigmoid, _smooth.softsign):
        assert saved_bytes(lambda run=run: run(x), [x]) == 0
    assert saved_bytes(lambda: F.logsigmoid(x), [x]) == 4000  # on CPU
    assert saved_bytes(lambda: F.softsign(x), [x]) == 4000


def composite(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("run", [composite, F.logsigmoid, F.softsign, lambda x: x * torch.sigmoid(1.702 * x)])
def test_from_input(run: Run) -> None:
    x = torch.randn(3, 100, requires_grad=True)
    lean = partial(_smooth.from_input, run)
    assert saved_bytes(lambda: lean(x), [x]) == 0
    assert saved_bytes(lambda: run(x), [x]) >= 1200
    for dtype in (torch.float32, torch.bfloat16):
        assert differences(lean, run, x.to(dtype)) == []
    with torch.autocast("cpu", torch.bfloat16):
        weight = torch.randn(100, 100)
        assert differences(lambda x: lean(x @ weight), lambda x: run(x @ weight), x) == []
    y = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lean, (y,))
    assert gradgradcheck(lean, (y,))


OPS = {
    "nn.functional.relu": _masked.relu,
    "nn.functional.relu6": lambda x, **k: _masked.hardtanh(x, 0.0, 6.0, **k),
    "nn.functional.leaky_relu": _masked.leaky_relu,
    "nn.functional.hardtanh": _masked.hardtanh,
    "nn.functional.hardsigmoid": _masked.hardsigmoid,
    "nn.functional.logsigmoid": _smooth.logsigmoid,
    "nn.functional.softsign": _smooth.softsign,
}


@pytest.mark.parametrize("name", OPS)
def test_torchs_own_op_samples(name: str) -> None:
    original = getattr(F, name.rpartition(".")[2])
    for dtype in (torch.float32, torch.bfloat16):
        count = 0
        for sample in op_samples(name, dtype):
            lean = lambda x, s=sample: OPS[name](x, *s.args, **s.kwargs)  # noqa: E731
            plain = lambda x, s=sample: original(x, *s.args, **s.kwargs)  # noqa: E731
            assert differences(lean, plain, sample.input) == []
            count += 1
        assert count


@pytest.mark.parametrize(("lean", "original"), MODULES)
def test_torchs_own_module_samples(lean: type[nn.Module], original: type[nn.Module]) -> None:
    count = 0
    for sample in module_samples(original):
        made = [kind(*sample.constructor_input.args, **sample.constructor_input.kwargs) for kind in (lean, original)]
        assert isinstance(made[0], original)
        assert_same_state(made[0], made[1])
        x = sample.forward_input.args[0]
        assert differences(lambda x, m=made: m[0](x * 1), lambda x, m=made: m[1](x * 1), x) == []
        count += 1
    assert count or original is nn.Hardsigmoid  # torch has no samples of it


@pytest.mark.parametrize(("lean", "original"), MODULES)
def test_another_class_is_all_that_a_conversion_needs(lean: type[nn.Module], original: type[nn.Module]) -> None:
    module, x = original(), torch.randn(3, 40)
    plain = copy.deepcopy(module)
    module.__class__ = lean
    for made in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(made) is lean
        assert differences(made, plain, x) == []
        assert torch.equal(made(x), plain(x))
        with torch.no_grad():
            assert torch.equal(made(x), plain(x))
        assert torch.equal(made.eval()(x), plain(x))


@pytest.mark.parametrize("name", CASES)
def test_compiled(name: str) -> None:
    x = torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)
    dynamic = name in ("relu", "hardsigmoid-inplace")
    assert compiled_differences(lambda x: CASES[name](x.sin() * 4), x, dynamic=dynamic) == []


def test_autocast() -> None:
    layer = nn.Linear(40, 40)
    for name, (lean, original) in MASKED.items():
        with torch.autocast("cpu", torch.bfloat16):
            assert outcome(lambda x, f=lean: f(layer(x)), torch.randn(3, 40))["output"].dtype == torch.bfloat16
            two = [lambda x, f=f: f(layer(x)) for f in (lean, original)]
            assert differences(two[0], two[1], torch.randn(3, 40)) == [], name


def test_functional_transforms() -> None:
    x = torch.randn(20)
    for lean, original in MASKED.values():
        found, right = (torch.func.grad(lambda x, f=f: f(x).sum())(x) for f in (lean, original))
        assert torch.equal(found, right)


class Break(nn.Module):
    """The graph ends here: what follows changes an input of the next one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x


def test_under_a_plan() -> None:
    """Whose capture answers False to ``is_compiling``, and takes every op that it sees for one that is needed."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 32), _activations.ReLU(inplace=True),
        nn.Linear(32, 32), Break(), _activations.LeakyReLU(0.1),
        nn.Linear(32, 32), Break(), _activations.Hardtanh(-0.5, 0.5, inplace=True),
        nn.Linear(32, 32), _activations.Hardsigmoid(),
        nn.Linear(32, 4), _activations.Softsign(),
    )  # fmt: skip
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    result = gs.verify(model, (x, y), loss=lambda o, b: (o - b[1]).square().mean(), budget="100%", steps=2, rounds=1)
    assert (result.equal, result.differences) == (True, ())


def test_in_place_is_refused_where_torch_refuses_it() -> None:
    leaf = torch.randn(4, requires_grad=True)
    for lean, _ in MASKED.values():
        with pytest.raises(RuntimeError, match="leaf"):
            lean(leaf, inplace=True)
        with pytest.raises(RuntimeError, match="leaf"):
            lean(leaf[:2], inplace=True)


def test_in_place_on_a_view_is_torchs_own() -> None:
    for name, (lean, original) in MASKED.items():
        if name == "leaky_relu-neg":
            continue
        runs = [lambda x, f=f: (y := x * 1, f(y[1:], inplace=True))[0] for f in (lean, original)]
        assert differences(runs[0], runs[1], torch.randn(3, 5)) == []


def test_an_input_that_was_kept_cannot_be_changed() -> None:
    x = torch.randn(4, requires_grad=True)
    y = x.exp()  # keeps its output
    _masked.relu(y, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_unknown_saves_is_named() -> None:
    with pytest.raises(gs.errors.PolicyError, match="saves='bits' is not known"):
        _masked.relu(torch.randn(3), saves="bits")


def test_the_comparison_sees_a_difference() -> None:
    x = torch.randn(100)
    assert differences(_masked.relu, partial(_masked.hardtanh, min_val=0.0, max_val=1.0), x) == ["output", "gradient"]
    assert differences(lambda x: _masked.relu(x) * 1.0, lambda x: F.relu(x) * torch.rand(()), x)[-1] == "random"
    assert differences(_masked.relu, lambda x: F.relu(x) + 0 * x.pow(2).clamp(0, 1e-7), torch.ones(3)) == []
    assert "gradient" in differences(_masked.relu, lambda x: F.relu(x) - (x - x.detach()) * 1e-6, x)
