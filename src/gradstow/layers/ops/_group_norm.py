"""GroupNorm whose statistics and sums are float32 whatever the input's type, from its input or its output."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from gradstow.layers.ops import _bits
from gradstow.layers.ops import _conditions as conditions
from gradstow.layers.ops import _invertible as invertible
from gradstow.layers.ops._again import differentiable_again
from gradstow.layers.ops._layer_norm import Found, empty_results, is_short, row_chunks, wide, widened_by_autocast


def group_norm(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    saves: str = "input",
) -> torch.Tensor:
    """``torch.nn.functional.group_norm``, bit-equal in float32 and float64.

    Shapes: ``x`` (N, C, ...), ``weight`` and ``bias`` (C).

    Kept for the backward: ``x`` as it was given (under autocast and for other strides too) and two float32 numbers per
    sample and group (float64 for float64). With ``saves="output"`` the output and one number instead. Then the
    normalised input is made again as ``(output - bias) / weight``, with an error of at most ``u |output / weight|``,
    u being half a unit in the last place of the output's type.

    Statistics, and the sums of the weight's and bias's gradients, are float32 for bfloat16 and float16 too.

    Raises:
        PolicyError: for another ``saves``.
        InvertibleError: with "output", where a weight is zero, or small beside its bias (the error has the limits).
        DoubleBackwardError: with "output", for a gradient that is to be differentiated again.
    """
    invertible.check_saves(saves)
    if not conditions.lean_runs(x, weight, bias) or not _usual(x, num_groups):
        return F.group_norm(x, num_groups, weight, bias, eps)
    return _GroupNorm.apply(x, num_groups, weight, bias, eps, saves)


def _usual(x: torch.Tensor, groups: int) -> bool:
    """The rest, errors among it, is left to the original: one number per group has no variance."""
    return x.dim() >= 2 and groups > 0 and x.shape[1] % groups == 0 and x.numel() > groups


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        groups: int,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        saves: str,
    ) -> torch.Tensor:
        ctx.groups, ctx.eps, ctx.saves, ctx.dtype = groups, eps, saves, x.dtype
        ctx.widened = widened_by_autocast(x)
        y, mean, rstd = _forward(x, groups, weight, bias, eps, ctx.widened)
        if saves == "output":
            rstd = invertible.checked(rstd, weight, bias, y.dtype)
            ctx.save_for_backward(y, weight, bias, None, rstd)
        else:
            ctx.save_for_backward(x, weight, bias, mean, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        kept, weight, bias, mean, rstd = ctx.saved_tensors
        needed = [ctx.needs_input_grad[i] for i in (0, 2, 3)]
        with conditions.without_autocast(kept):
            if torch.is_grad_enabled() and not _bits.is_traced():
                invertible.refuse_double_backward(ctx.saves)
                inputs = (kept, weight, bias)
                found = differentiable_again(_original(ctx.groups, ctx.eps, ctx.widened), inputs, needed, g)
            elif mean is not None and _as_torch_does(g, kept, weight):
                found = _torch_backward(g, kept, ctx.groups, mean, rstd, weight, needed)
            else:
                found = group_norm_backward(g, kept, ctx.groups, mean, rstd, weight, bias, ctx.dtype, needed)
        dx, dw, db = (t if need else None for t, need in zip(found, needed, strict=True))
        return dx, None, _like(dw, weight), _like(db, bias), None, None


def _like(gradient: torch.Tensor | None, parameter: torch.Tensor | None) -> torch.Tensor | None:
    return gradient if gradient is None or parameter is None else gradient.to(parameter.dtype)


def _forward(
    x: torch.Tensor, groups: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, widened: bool
) -> Found:
    mixed = weight is not None and weight.dtype != x.dtype
    if widened or (x.device.type != "cpu" and (is_short(x.dtype) or mixed)):
        dtype = torch.float32 if widened and is_short(x.dtype) else x.dtype
        return group_norm_wide(x, groups, weight, bias, eps, dtype)
    x = as_torch_reads(x)
    weight, bias = _weight(x, weight), wide(bias)
    return torch.ops.aten.native_group_norm.default(x, weight, bias, *_sizes(x), groups, eps)


def _torch_backward(
    g: torch.Tensor,
    x: torch.Tensor,
    groups: int,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    needed: list[bool],
) -> Any:
    layout = _layout(x)
    g, x = g.contiguous(memory_format=layout), x.contiguous(memory_format=layout)
    backward = torch.ops.aten.native_group_norm_backward.default
    return backward(g, x, mean, rstd, _weight(x, weight), *_sizes(x), groups, needed)


def _weight(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor | None:
    """In float32 where the input is shorter: the kernel keeps its statistics, and sums, in the type of the weights."""
    if not is_short(x.dtype):
        return weight
    return torch.ones(x.shape[1], dtype=torch.float32, device=x.device) if weight is None else wide(weight)


def _as_torch_does(g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """Whether torch's kernel takes these, and sums in float32."""
    if g.dtype != x.dtype:
        return False
    if is_short(x.dtype):
        return x.device.type == "cpu"
    return weight is None or weight.dtype == x.dtype


def _sizes(x: torch.Tensor) -> tuple[int, int, int]:
    return x.shape[0], x.shape[1], math.prod(x.shape[2:])


def as_torch_reads(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=_layout(x))


def _layout(x: torch.Tensor) -> torch.memory_format:
    """torch's kernels keep channels_last on CPU only, where the strides, contiguous or not, are in that order."""
    if x.device.type != "cpu" or x.dim() not in (4, 5) or x.stride(1) == 0:
        return torch.contiguous_format
    reach = 0
    for dim in (1, *range(x.dim() - 1, 1, -1), 0):
        if x.stride(dim) < reach or (dim == 0 and reach == x.stride(1)):  # the latter: all orders are the same
            return torch.contiguous_format
        reach = x.stride(dim) * max(x.shape[dim], 1)
    return torch.channels_last if x.dim() == 4 else torch.channels_last_3d


def _original(groups: int, eps: float, widened: bool) -> Any:
    def run(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        if widened:
            x, weight, bias = wide(x), wide(weight), wide(bias)
        return F.group_norm(x, groups, weight, bias, eps)

    return run


def _statistics_type(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _wide(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> Found:
    """Some samples at a time in float32, for kernels that cannot keep their statistics in it otherwise."""
    kind = _statistics_type(x)
    w, b = (None if t is None else t.to(kind) for t in (weight, bias))
    y, mean, rstd = _fake_wide(x, groups, weight, bias, eps, dtype)
    for part in row_chunks(x.shape[0], math.prod(x.shape[1:]), x.device):
        some = x[part].to(kind, memory_format=torch.contiguous_format)
        found = torch.ops.aten.native_group_norm.default(some, w, b, *_sizes(some), groups, eps)
        y[part], mean[part], rstd[part] = found
    return y, mean, rstd


def _fake_wide(x: torch.Tensor, groups: int, weight: Any, bias: Any, eps: float, dtype: torch.dtype) -> Found:
    mean, rstd = (x.new_empty((x.shape[0], groups), dtype=_statistics_type(x)) for _ in range(2))
    return x.new_empty(x.shape, dtype=dtype), mean, rstd


def _backward(
    g: torch.Tensor,
    kept: torch.Tensor,
    groups: int,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    needed: list[bool],
) -> Found:
    """``kept`` is the input, or without ``mean`` the output. Some samples at a time."""
    kind, (samples, channels, each) = rstd.dtype, _sizes(kept)
    w, b = (None if t is None else t.to(kind) for t in (weight, bias))
    results = empty_results(kept, weight, bias, dtype, needed)
    sums = [rstd.new_zeros(channels if need else 0) for need in needed[1:]]
    backward = torch.ops.aten.native_group_norm_backward.default
    for part in row_chunks(samples, channels * each, kept.device):
        x, along = (t[part].reshape(-1, channels, each).to(kind) for t in (kept, g))
        center, scale = mean if mean is None else mean[part], rstd[part]
        if center is None:
            columns = (None if t is None else t.unsqueeze(1) for t in (w, b))
            x = invertible.normalised(x, *columns)
            center, scale = torch.zeros_like(scale), torch.ones_like(scale)
        dx, *others = backward(along.contiguous(), x.contiguous(), center, scale, w, *_sizes(x), groups, needed)
        if needed[0]:
            if mean is None:
                dx.view(-1, groups, channels // groups * each).mul_(rstd[part].unsqueeze(2))
            results[0][part] = dx.view(results[0][part].shape)
        for total, found, need in zip(sums, others, needed[1:], strict=True):
            if need:
                total += found
    for result, total in zip(results[1:], sums, strict=True):
        if result.numel():
            result.copy_(total)
    return results


def _fake_backward(
    g: Any, kept: torch.Tensor, groups: Any, mean: Any, rstd: Any, weight: Any, bias: Any, dtype: Any, needed: Any
) -> Any:
    return empty_results(kept, weight, bias, dtype, needed)


group_norm_wide = _bits.register(
    "group_norm_wide(Tensor x, int groups, Tensor? weight, Tensor? bias, float eps, ScalarType dtype) "
    "-> (Tensor, Tensor, Tensor)",
    _wide,
    _fake_wide,
)
group_norm_backward = _bits.register(
    "group_norm_backward(Tensor g, Tensor kept, int groups, Tensor? mean, Tensor rstd, Tensor? weight, Tensor? bias, "
    "ScalarType dtype, bool[] needed) -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
