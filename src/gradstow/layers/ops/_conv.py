"""A convolution with its activation as one node."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from gradstow.layers.ops import _bits
from gradstow.layers.ops import _conditions as conditions
from gradstow.layers.ops import _epilogue as epilogue
from gradstow.layers.ops._again import differentiable_again
from gradstow.layers.ops._epilogue import Activation

_PLAIN = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


class Geometry(NamedTuple):
    """How a convolution moves over its input: one number per dimension, and the groups."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | str | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    activation: str | Activation | None = None,
    saves: str = "output",
) -> torch.Tensor:
    """``activation(conv(x, weight, bias))`` in 1, 2 or 3 dimensions as one node, bit-equal to torch's two.

    Shapes: ``x`` (N, C, ...) or (C, ...), ``weight`` (out, C / groups, ...), ``bias`` (out).

    Kept for the backward: ``x`` where the weight needs a gradient (torch keeps it always); the weight and the bias by
    reference, under autocast too; for the activation its output, or with ``saves="mask"`` one bit per element (relu,
    relu6, hardtanh, leaky_relu). gelu, silu, mish, hardswish and elu keep ``x`` and make the pre-activation again.

    Raises:
        PolicyError: for an activation or ``saves`` that does not exist, or a mask for one of the latter.
    """
    act = epilogue.activation_of(activation)
    dtype = conditions.compute_dtype(x)
    way = epilogue.way_of(act, saves, dtype or x.dtype)
    n = weight.dim() - 2
    strides, dilations = _each(stride, n), _each(dilation, n)
    misfit = x.dim() not in (n + 1, n + 2) or (padding == "same" and any(s != 1 for s in strides))
    if n not in _PLAIN or misfit or not conditions.lean_runs(x, weight, bias):
        return epilogue.activate_(_PLAIN[n](x, weight, bias, stride, padding, dilation, groups), act)
    x, paddings = resolve_padding(x, weight, padding, dilations)
    x = conditions.cast(x, dtype)
    batch = x if x.dim() == n + 2 else x.unsqueeze(0)
    y = _Convolution.apply(batch, weight, bias, Geometry(strides, paddings, dilations, groups), act, way, dtype)
    return y if x.dim() == n + 2 else y.squeeze(0)


def resolve_padding(
    x: torch.Tensor, weight: torch.Tensor, padding: int | str | tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The padding on both sides as numbers. What "same" needs more at the end of a dimension is put onto ``x``."""
    n = weight.dim() - 2
    if padding == "valid":
        return x, (0,) * n
    if not isinstance(padding, str):
        return x, _each(padding, n)
    totals = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    if any(total % 2 for total in totals):
        x = F.pad(x, [part for total in reversed(totals) for part in (0, total % 2)])
    return x, tuple(total // 2 for total in totals)


def _each(value: Any, n: int) -> tuple[int, ...]:
    """One number per dimension."""
    if isinstance(value, int):
        return (value,) * n
    return tuple(value) if len(value) == n else tuple(value) * n


def run_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, geometry: Geometry, dtype: torch.dtype | None
) -> torch.Tensor:
    """The kernel that torch's own convolution calls, on a weight cast to ``dtype``."""
    stride, padding, dilation, groups = geometry
    args = (stride, padding, dilation, False, (0,) * len(stride), groups)
    return torch.ops.aten.convolution.default(x, conditions.cast(weight, dtype), conditions.cast(bias, dtype), *args)


def convolution_gradients(
    g: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    geometry: Geometry,
    dtype: torch.dtype | None,
    needed: tuple[bool, ...],
) -> tuple[torch.Tensor | None, ...]:
    """For input, weight and bias, by torch's kernel, which is differentiable again."""
    stride, padding, dilation, groups = geometry
    backward = torch.ops.aten.convolution_backward.default
    sizes = [weight.size(0)] if needed[2] else None
    args = (sizes, stride, padding, dilation, False, (0,) * len(stride), groups, list(needed))
    return tuple(backward(g, x, conditions.cast(weight, dtype), *args))


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        geometry: Geometry,
        act: Activation | None,
        way: str,
        dtype: torch.dtype | None,
    ) -> torch.Tensor:
        z = run_convolution(x, weight, bias, geometry, dtype)
        ctx.geometry, ctx.act, ctx.way, ctx.dtype, ctx.stride = geometry, act, way, dtype, z.stride()
        y, kept = epilogue.activate_and_keep(z, act, way)
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        again = way == "input"
        keeps_x = for_weight or again
        ctx.layout = None if keeps_x else (x.shape, torch.empty_like(x, device="meta").stride())
        ctx.save_for_backward(
            x if keeps_x else None,
            weight if for_x or for_weight or for_bias or again else None,
            bias if again else None,
            kept,
        )
        return y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, weight, bias, kept = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        nothing = (None,) * 4
        with conditions.without_autocast(g):
            if ctx.way == "input" and torch.is_grad_enabled() and not _bits.is_traced():
                inputs = (x, weight, bias)
                return *differentiable_again(_original(ctx), inputs, needed, g), *nothing
            if ctx.way == "input":
                z = run_convolution(x, weight, bias, ctx.geometry, ctx.dtype)
                g = epilogue.gradient_from_input(g, z, ctx.act)
                del z
            elif ctx.way == "mask":
                g = epilogue.gradient_from_bits(g, kept, ctx.stride, ctx.act)
            elif ctx.way == "output":
                g = epilogue.gradient_from_output(g, kept, ctx.act)
            if x is None:
                # Without the weight's gradient the numbers are not used, only sizes and layout. Where the bias alone
                # needs one, torch's kernel makes the weight's on the way, and sums up in another order than ``sum``.
                x = g.new_empty_strided(*ctx.layout)
            return *convolution_gradients(g, x, weight, ctx.geometry, ctx.dtype, needed), *nothing


def _original(ctx: Any) -> Any:
    geometry, act, dtype = ctx.geometry, ctx.act, ctx.dtype

    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return epilogue.activate_(run_convolution(x, weight, bias, geometry, dtype), act)

    return run
