"""Piecewise linear activations: their gradient needs one bit per element, or the output.

Each kind is torch's own forward and torch's own backward kernel. That kernel reads the input only to compare it, so in
the backward it gets numbers made from the bits instead, and its results are equal to the last bit, NaN included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from gradstow._errors import PolicyError
from gradstow.layers.ops import _bits

aten = torch.ops.aten

_FORWARD: dict[str, Callable[..., torch.Tensor]] = {
    "relu": lambda x, a, b, inplace: F.relu(x, inplace),
    "leaky_relu": lambda x, a, b, inplace: F.leaky_relu(x, a, inplace),
    "hardtanh": F.hardtanh,
    "hardsigmoid": lambda x, a, b, inplace: F.hardsigmoid(x, inplace),
}


def _kernel(kind: str, a: float, b: float) -> tuple[Any, tuple[Any, ...]]:
    """torch's backward of this kind, and what it takes behind the gradient and the input."""
    return {
        "relu": (aten.threshold_backward, (0.0,)),
        "leaky_relu": (aten.leaky_relu_backward, (a, False)),
        "hardtanh": (aten.hardtanh_backward, (a, b)),
        "hardsigmoid": (aten.hardsigmoid_backward, ()),
    }[kind]


def _gate_bits(x: torch.Tensor, stride: Sequence[int], kind: str, a: float, b: float) -> torch.Tensor:
    flat = _bits.in_order(x, stride)
    if kind == "relu":  # ``x`` is its output: where that is not zero, NaN too
        return _bits.packed(flat)
    backward, rest = _kernel(kind, 0.0 if kind == "leaky_relu" else a, b)
    one = x.new_ones(())  # the kernel itself is asked what passes: only it knows what it does with NaN
    return _bits.packed(flat, lambda part: backward(one.expand_as(part), part, *rest))


def _gate_gradient(
    gradient: torch.Tensor, code: torch.Tensor, stride: Sequence[int], kind: str, a: float
) -> torch.Tensor:
    backward, rest = _kernel(kind, a, 0.0)
    if kind == "hardtanh":
        rest = (0.5, 2.0)  # 1 lies between, 0 does not
    numel = gradient.numel()
    if not _bits.same_order(gradient, stride):  # how the result then lies in memory is the kernel's to say
        stand_in = gradient.new_empty_strided(gradient.shape, stride)
        flat = stand_in.as_strided((numel,), (1,))
        for start, end in _bits.pieces(numel, gradient.device):
            flat[start:end] = _stand_in(code, start, end, kind, gradient.dtype)
        return backward(gradient, stand_in, *rest)
    result = torch.empty_like(gradient)
    source, target = _bits.in_order(gradient, stride), _bits.in_order(result, stride)
    for start, end in _bits.pieces(numel, gradient.device):
        stand_in = _stand_in(code, start, end, kind, gradient.dtype)
        backward.grad_input(source[start:end], stand_in, *rest, grad_input=target[start:end])
    return result


def _stand_in(code: torch.Tensor, start: int, end: int, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """1 where the gradient passes and 0 where not; for the hard sigmoid 0 and 4, in and out of (−3, 3)."""
    numbers = _bits.numbers(code, start, end, dtype)
    return numbers.sub_(1).mul_(-4) if kind == "hardsigmoid" else numbers


def _fake_bits(x: torch.Tensor, stride: Sequence[int], kind: str, a: float, b: float) -> torch.Tensor:
    return x.new_empty(_bits.code_bytes(x.numel()), dtype=torch.uint8)


def _fake_gradient(
    gradient: torch.Tensor, code: torch.Tensor, stride: Sequence[int], kind: str, a: float
) -> torch.Tensor:
    if _bits.same_order(gradient, stride):
        return torch.empty_like(gradient)
    backward, rest = _kernel(kind, a, 0.0)
    return backward(gradient, gradient.new_empty_strided(gradient.shape, stride), *rest)


gate_bits = _bits.register(
    "gate_bits(Tensor x, SymInt[] stride, str kind, float a, float b) -> Tensor", _gate_bits, _fake_bits
)
gate_gradient = _bits.register(
    "gate_gradient(Tensor gradient, Tensor code, SymInt[] stride, str kind, float a) -> Tensor",
    _gate_gradient,
    _fake_gradient,
)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(x: Any, tie: Any, kind: str, a: float, b: float, inplace: bool) -> tuple[torch.Tensor, torch.Tensor]:
        if inplace and kind != "relu":
            code = gate_bits(x, x.stride(), kind, a, b)
            _FORWARD[kind](x, a, b, True)
            return x, code
        y = _FORWARD[kind](x, a, b, inplace)
        return y, gate_bits(y if kind == "relu" else x, y.stride(), kind, a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        x, tie, ctx.kind, ctx.a, _, inplace = inputs
        y, code = output
        if inplace:
            ctx.mark_dirty(x)
        ctx.mark_non_differentiable(code)
        ctx.set_materialize_grads(False)
        ctx.stride = y.stride()
        ctx.save_for_backward(code, tie)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None, _: None) -> tuple[torch.Tensor | None, ...]:
        code, tie = ctx.saved_tensors
        wanted = gradient is not None and ctx.needs_input_grad[0]
        return _gated_gradient(gradient, code, tie, ctx) if wanted else None, None, None, None, None, None


class _GateGradient(torch.autograd.Function):
    """The gradient as a function of its own, for double backward: linear, and zero along the input."""

    @staticmethod
    def forward(gradient: Any, code: Any, tie: Any, stride: Sequence[int], kind: str, a: float) -> torch.Tensor:
        return gate_gradient(gradient, code, stride, kind, a)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, code, tie, ctx.stride, ctx.kind, ctx.a = inputs
        ctx.save_for_backward(code, tie)

    @staticmethod
    def backward(ctx: Any, along: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        code, tie = ctx.saved_tensors
        first = _gated_gradient(along, code, tie, ctx) if ctx.needs_input_grad[0] else None
        return first, None, _bits.untied(tie) if ctx.needs_input_grad[2] else None, None, None, None


def _gated_gradient(gradient: Any, code: torch.Tensor, tie: torch.Tensor | None, ctx: Any) -> torch.Tensor:
    if torch.is_grad_enabled():
        return _GateGradient.apply(gradient, code, tie, ctx.stride, ctx.kind, ctx.a)
    return gate_gradient(gradient, code, ctx.stride, ctx.kind, ctx.a)


class _FromOutput(torch.autograd.Function):
    """Keeps the output instead of the input. The backward is torch's own function, which is differentiable."""

    @staticmethod
    def forward(x: torch.Tensor, kind: str, a: float, b: float, inplace: bool) -> torch.Tensor:
        return _FORWARD[kind](x, a, b, inplace)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, kind, ctx.a, ctx.b, inplace = inputs
        if inplace:
            ctx.mark_dirty(x)
        ctx.leaky = kind == "leaky_relu"
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if gradient is None:
            return None, None, None, None, None
        (y,) = ctx.saved_tensors
        if ctx.leaky:
            return aten.leaky_relu_backward(gradient, y, ctx.a, True), None, None, None, None
        return aten.hardtanh_backward(gradient, y, ctx.a, ctx.b), None, None, None, None


def _tells(kind: str, dtype: torch.dtype, a: float, b: float) -> bool:
    """Whether the output says which gradients pass, exactly."""
    if kind == "hardtanh":  # short types round the limits, and the kernel compares with those that are not rounded
        exact = all(float(limit).is_integer() and abs(limit) <= 256 for limit in (a, b))
        return exact or dtype in (torch.float32, torch.float64)
    return kind == "relu" or (kind == "leaky_relu" and a >= 0)


def _gated(kind: str, x: torch.Tensor, a: float, b: float, inplace: bool, saves: str) -> torch.Tensor:
    if saves not in ("mask", "output"):
        raise PolicyError(f"saves={saves!r} is not known: an activation keeps its mask or its output for the backward; "
                          'set it to "mask" or "output"')  # fmt: skip
    refused = inplace and (not _bits.may_overwrite(x) or (kind == "leaky_relu" and a < 0))
    if not _bits.is_lean(x) or _bits.is_expanded(x) or refused:
        return _FORWARD[kind](x, a, b, inplace)
    if saves == "output" and _tells(kind, x.dtype, a, b):
        if kind == "relu":  # torch keeps its output itself
            return F.relu(x, inplace)
        return _FromOutput.apply(x, kind, a, b, inplace)
    return _Gate.apply(x, _bits.tie(x), kind, a, b, inplace)[0]


def relu(x: torch.Tensor, inplace: bool = False, saves: str = "mask") -> torch.Tensor:
    """ReLU that keeps one bit per element, ceil(n / 8) bytes, or its output (``saves="output"``, as torch does).

    Any shape and floating type; equal to ``F.relu`` with its gradients, NaN and second derivatives included. In place
    on a leaf, a view, or in compiled code, torch's own runs.
    """
    return _gated("relu", x, 0.0, 0.0, inplace, saves)


def leaky_relu(
    x: torch.Tensor, negative_slope: float = 0.01, inplace: bool = False, saves: str = "mask"
) -> torch.Tensor:
    """Leaky ReLU that keeps one bit per element, ceil(n / 8) bytes, or its output where the slope is not negative."""
    return _gated("leaky_relu", x, negative_slope, 0.0, inplace, saves)


def hardtanh(
    x: torch.Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False, saves: str = "mask"
) -> torch.Tensor:
    """``x`` between two limits; keeps one bit per element, ceil(n / 8) bytes, or its output.

    The output serves for float32 and float64, and for other types where the limits are small whole numbers. What the
    gradient at NaN is depends in torch's CPU kernel on the place in a vector register; with one thread it is equal.
    """
    return _gated("hardtanh", x, min_val, max_val, inplace, saves)


def hardsigmoid(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """Hard sigmoid that keeps one bit per element, ceil(n / 8) bytes. Its output is rounded and would not do."""
    return _gated("hardsigmoid", x, 0.0, 0.0, inplace, "mask")
