"""What linear layers, convolutions and batch norms do to their own result in the same node: an activation.

Each activation's gradient follows from the output, from the pre-activation, or from either. From the output it costs
nothing extra, as the next layer keeps that anyway; from one bit per element where there is no such layer; else the
pre-activation is made again in the backward, by the same kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from gradstow import _ops
from gradstow._errors import PolicyError
from gradstow.layers.ops import _bits, _masked

aten = torch.ops.aten


class Activation(NamedTuple):
    """An activation with its numbers: ``Activation("leaky_relu", 0.2)``, ``Activation("hardtanh", -1.0, 1.0)``.

    Attributes:
        name: a name that ``activation=`` takes.
        a: leaky_relu's slope, hardtanh's lower limit, elu's alpha; nothing to the others.
        b: hardtanh's upper limit.
    """

    name: str
    a: float = 0.0
    b: float = 0.0


class _Formulas(NamedTuple):
    """``apply_`` works in place; ``gradient(g, kept, a, b)`` takes what ``source`` says."""

    apply_: Callable[[torch.Tensor, float, float], torch.Tensor]
    gradient: Callable[..., torch.Tensor]
    source: str  # "either" (output or pre-activation), "output", "input" (the pre-activation)


_FORMULAS = {
    "relu": _Formulas(
        lambda z, a, b: aten.relu_.default(z),
        lambda g, kept, a, b: aten.threshold_backward.default(g, kept, 0.0),
        "either",
    ),
    "hardtanh": _Formulas(
        lambda z, a, b: aten.hardtanh_.default(z, a, b),
        lambda g, kept, a, b: aten.hardtanh_backward.default(g, kept, a, b),
        "either",
    ),
    "leaky_relu": _Formulas(
        # autograd cannot go back through a negative slope that was applied in place
        lambda z, a, b: aten.leaky_relu_.default(z, a) if a >= 0 else aten.leaky_relu.default(z, a),
        lambda g, kept, a, b: aten.leaky_relu_backward.default(g, kept, a, False),
        "either",
    ),
    "sigmoid": _Formulas(
        lambda z, a, b: aten.sigmoid_.default(z),
        lambda g, kept, a, b: aten.sigmoid_backward.default(g, kept),
        "output",
    ),
    "tanh": _Formulas(
        lambda z, a, b: aten.tanh_.default(z),
        lambda g, kept, a, b: aten.tanh_backward.default(g, kept),
        "output",
    ),
    "gelu": _Formulas(
        lambda z, a, b: aten.gelu_.default(z),
        lambda g, kept, a, b: aten.gelu_backward.default(g, kept),
        "input",
    ),
    "gelu_tanh": _Formulas(
        lambda z, a, b: aten.gelu_.default(z, approximate="tanh"),
        lambda g, kept, a, b: aten.gelu_backward.default(g, kept, approximate="tanh"),
        "input",
    ),
    "silu": _Formulas(
        lambda z, a, b: aten.silu_.default(z),
        lambda g, kept, a, b: aten.silu_backward.default(g, kept),
        "input",
    ),
    "mish": _Formulas(
        lambda z, a, b: aten.mish_.default(z),
        lambda g, kept, a, b: aten.mish_backward.default(g, kept),
        "input",
    ),
    "hardswish": _Formulas(
        lambda z, a, b: aten.hardswish_.default(z),
        lambda g, kept, a, b: aten.hardswish_backward.default(g, kept),
        "input",
    ),
    "elu": _Formulas(
        # in place autograd takes another formula, from the output, which rounds otherwise
        lambda z, a, b: aten.elu_.default(z, a) if a >= 0 and not z.requires_grad else aten.elu.default(z, a),
        lambda g, kept, a, b: aten.elu_backward.default(g, a, 1.0, 1.0, False, kept),
        "input",
    ),
}
_DEFAULTS = {
    "relu6": Activation("hardtanh", 0.0, 6.0),
    "hardtanh": Activation("hardtanh", -1.0, 1.0),
    "leaky_relu": Activation("leaky_relu", 0.01),
    "elu": Activation("elu", 1.0),
}
_MODULES = {
    nn.ReLU: "relu",
    nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh",
    nn.SiLU: "silu",
    nn.Mish: "mish",
    nn.Hardswish: "hardswish",
}
_MASKED = ("relu", "hardtanh", "leaky_relu")
_OUT = {
    "relu": lambda g, kept, a, b: aten.threshold_backward.grad_input(g, kept, 0.0, grad_input=kept),
    "hardtanh": lambda g, kept, a, b: aten.hardtanh_backward.grad_input(g, kept, a, b, grad_input=kept),
    "leaky_relu": lambda g, kept, a, b: aten.leaky_relu_backward.grad_input(g, kept, a, False, grad_input=kept),
}


def activation_of(given: str | Activation | None) -> Activation | None:
    """Read an ``activation=``: a name, an ``Activation``, or None for none.

    Raises:
        PolicyError: for a name that does not exist.
    """
    if given is None:
        return None
    name = given if isinstance(given, str) else given.name
    if name not in _FORMULAS and name not in _DEFAULTS:
        known = ", ".join(sorted({*_FORMULAS, *_DEFAULTS}))
        raise PolicyError(f"the activation {name!r} does not exist. Known are {known}; None is for none.")
    if not isinstance(given, str) and given.name in _FORMULAS:
        return given
    return _DEFAULTS.get(name) or Activation(name)


def activation_of_module(module: nn.Module, kind: type | None) -> Activation | None:
    """What a torch module of exactly this ``kind`` computes, where it is an activation known here."""
    m: Any = module
    if kind is not None and kind in _MODULES:
        return Activation(_MODULES[kind])
    if kind is nn.ReLU6 or kind is nn.Hardtanh:
        return Activation("hardtanh", float(m.min_val), float(m.max_val))
    if kind is nn.LeakyReLU:
        return Activation("leaky_relu", float(m.negative_slope))
    if kind is nn.ELU:
        return Activation("elu", float(m.alpha))
    if kind is nn.GELU:
        return Activation("gelu" if m.approximate == "none" else "gelu_tanh")
    return None


def way_of(activation: Activation | None, saves: str, dtype: torch.dtype = torch.float32) -> str:
    """What a node keeps for its activation's gradient: ``"output"``, ``"mask"``, ``"input"`` or ``"nothing"``.

    Raises:
        PolicyError: where ``saves`` is unknown, or a mask does not say enough.
    """
    if saves not in ("output", "mask"):
        raise PolicyError(f'saves={saves!r} does not exist. Take "output", or "mask" for one bit per element.')
    if activation is None:
        return "nothing"
    if saves == "mask" and not has_bits(activation):
        raise PolicyError(f'one bit does not give the gradient of {activation.name}. Take saves="output".')
    if _FORMULAS[activation.name].source == "input":
        return "input"
    return "output" if saves == "output" and _output_tells(activation, dtype) else "mask"


def _output_tells(activation: Activation, dtype: torch.dtype) -> bool:
    """Whether the output says exactly what passes: not where a slope flips its sign, nor where a short type rounds
    the limits, which torch compares unrounded."""
    if activation.name == "leaky_relu":
        return activation.a >= 0
    if activation.name == "hardtanh" and dtype not in (torch.float32, torch.float64):
        return all(float(limit).is_integer() and abs(limit) <= 256 for limit in activation[1:])
    return True


def has_bits(activation: Activation) -> bool:
    """Whether one bit per element gives the gradient."""
    return activation.name in _MASKED


def activate_(z: torch.Tensor, activation: Activation | None) -> torch.Tensor:
    """In place."""
    return z if activation is None else _FORMULAS[activation.name].apply_(z, activation.a, activation.b)


def gradient_from_output(g: torch.Tensor, y: torch.Tensor, activation: Activation) -> torch.Tensor:
    formulas = _FORMULAS[activation.name]
    if formulas.source == "either":
        y = y.detach()  # the gradient is flat in it
    return formulas.gradient(g, y, activation.a, activation.b)


def gradient_from_input(g: torch.Tensor, z: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The gradient for the pre-activation ``z``, whose memory may be used for the result."""
    formulas = _FORMULAS[activation.name]
    alone = not torch.is_grad_enabled() and not _bits.is_traced()
    if formulas.source == "either" and alone and g.stride() == z.stride():  # the layout must be that of torch's result
        return _OUT[activation.name](g, z, activation.a, activation.b)
    kept = activate_(z, activation) if formulas.source == "output" else z
    return formulas.gradient(g, kept, activation.a, activation.b)


def bits_of(z: torch.Tensor, activation: Activation) -> torch.Tensor:
    """One bit per element, in the order of its memory, NaN as torch has it: of the pre-activation, or ReLU's output."""
    return _masked.gate_bits(z, z.stride(), *activation)


def gradient_from_bits(
    g: torch.Tensor, code: torch.Tensor, stride: tuple[int, ...], activation: Activation
) -> torch.Tensor:
    if not torch.is_grad_enabled() or _bits.is_traced():
        return _masked.gate_gradient(g, code, stride, activation.name, activation.a)
    mask = _ops.unpack_bits(code, g.shape, stride)
    return torch.where(mask, g, g * activation.a if activation.name == "leaky_relu" else 0.0)


def activate_and_keep(
    z: torch.Tensor, activation: Activation | None, way: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output, in the memory of ``z``, and what its gradient needs in this way."""
    if activation is None or way == "input":
        return activate_(z, activation), None
    if way == "output":
        y = activate_(z, activation)
        return y, y
    if activation.name == "relu":
        y = activate_(z, activation)
        return y, bits_of(y, activation)
    code = bits_of(z, activation)
    return activate_(z, activation), code
