"""A linear layer with its activation as one node."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from gradstow.layers.ops import _bits
from gradstow.layers.ops import _conditions as conditions
from gradstow.layers.ops import _epilogue as epilogue
from gradstow.layers.ops._again import differentiable_again
from gradstow.layers.ops._epilogue import Activation


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | Activation | None = None,
    saves: str = "output",
) -> torch.Tensor:
    """``activation(x @ weight.T + bias)`` as one node, bit-equal to ``torch.nn.functional.linear`` and the activation.

    Shapes: ``x`` (..., in), ``weight`` (out, in), ``bias`` (out); the result is (..., out).

    Kept for the backward: ``x`` where the weight needs a gradient; the weight and the bias by reference, under
    autocast too; for the activation its output, or with ``saves="mask"`` one bit per element (relu, relu6, hardtanh,
    leaky_relu). gelu, silu, mish, hardswish and elu keep ``x`` and make the pre-activation again.

    Raises:
        PolicyError: for an activation or ``saves`` that does not exist, or a mask for one of the latter.
    """
    act = epilogue.activation_of(activation)
    dtype = conditions.compute_dtype(x)
    way = epilogue.way_of(act, saves, dtype or x.dtype)
    if x.dim() < 2 or weight.dim() != 2 or not conditions.lean_runs(x, weight, bias):
        return plain_linear(x, weight, bias, act)
    if act is None and dtype is None:
        return F.linear(x, weight, bias)  # torch itself keeps nothing here that nobody needs
    return _Linear.apply(conditions.cast(x, dtype), weight, bias, act, way, dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        act: Activation | None,
        way: str,
        dtype: torch.dtype | None,
    ) -> torch.Tensor:
        z = F.linear(x, conditions.cast(weight, dtype), conditions.cast(bias, dtype))
        ctx.act, ctx.way, ctx.dtype, ctx.stride = act, way, dtype, z.stride()
        # torch makes z as a view of a matrix; a view that leaves a Function cannot be changed in place later
        z = torch.ops.aten._unsafe_view.default(z, z.shape)
        y, kept = epilogue.activate_and_keep(z, act, way)
        for_x, for_weight, _ = ctx.needs_input_grad[:3]
        again = way == "input"
        ctx.save_for_backward(
            x if for_weight or again else None,
            weight if for_x or again else None,
            bias if again else None,
            kept,
        )
        return y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, weight, bias, kept = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        with conditions.without_autocast(g):
            if ctx.way == "input" and torch.is_grad_enabled() and not _bits.is_traced():
                inputs = (x, weight, bias)
                return *differentiable_again(_original(ctx.act, ctx.dtype), inputs, needed, g), None, None, None
            if ctx.way == "input":
                z = F.linear(x, conditions.cast(weight, ctx.dtype), conditions.cast(bias, ctx.dtype))
                g = epilogue.gradient_from_input(g, z, ctx.act)
                del z
            elif ctx.way == "mask":
                g = epilogue.gradient_from_bits(g, kept, ctx.stride, ctx.act)
            elif ctx.way == "output":
                g = epilogue.gradient_from_output(g, kept, ctx.act)
            return *_gradients(g, x, conditions.cast(weight, ctx.dtype), needed), None, None, None


def _gradients(
    g: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor | None, needed: tuple[bool, ...]
) -> tuple[torch.Tensor | None, ...]:
    """In differentiable operators. Autograd casts a gradient to its parameter's type."""
    rows = g.flatten(0, -2)
    for_x = for_weight = for_bias = None
    if needed[0] and weight is not None:
        for_x = rows.mm(weight).view(*g.shape[:-1], weight.size(1))
    if needed[1] and x is not None:
        for_weight = rows.t().mm(x.flatten(0, -2))
    if needed[2]:
        for_bias = rows.sum(0)
    return for_x, for_weight, for_bias


def plain_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, act: Activation | None
) -> torch.Tensor:
    return epilogue.activate_(F.linear(x, weight, bias), act)


def _original(act: Activation | None, dtype: torch.dtype | None) -> Any:
    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return plain_linear(x, conditions.cast(weight, dtype), conditions.cast(bias, dtype), act)

    return run
