"""LayerNorm whose statistics and sums are float32 whatever the input's type, from its input or its output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from gradstow.layers.ops import _bits
from gradstow.layers.ops import _conditions as conditions
from gradstow.layers.ops import _invertible as invertible
from gradstow.layers.ops import triton as kernels
from gradstow.layers.ops._again import differentiable_again

Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_CHUNK = {"cpu": 1 << 19}  # elements that are float32 at a time; more where starting an op costs more


def layer_norm(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    saves: str = "input",
) -> torch.Tensor:
    """``torch.nn.functional.layer_norm``, bit-equal in float32 and float64.

    Shapes: ``x`` (..., *normalized_shape), ``weight`` and ``bias`` normalized_shape.

    Kept for the backward: ``x`` as it was given (under autocast too) and two float32 numbers per row (float64 for
    float64). With ``saves="output"`` the output and one number per row instead: nothing extra where the next layer
    keeps that anyway. Then the normalised input is made again as ``(output - bias) / weight``, with an error of at
    most ``u |output / weight|``, u being half a unit in the last place of the output's type.

    The weight's and bias's gradients are summed in float32 for bfloat16 and float16 too, of which a part at a time is
    taken in float32. (PyTorch sums them in the input's type on CPU.)

    Raises:
        PolicyError: for another ``saves``.
        InvertibleError: with "output", where a weight is zero, or small beside its bias (the error has the limits).
        DoubleBackwardError: with "output", for a gradient that is to be differentiated again.
    """
    invertible.check_saves(saves)
    if not conditions.lean_runs(x, weight, bias):
        return F.layer_norm(x, normalized_shape, weight, bias, eps)
    return _LayerNorm.apply(x, list(normalized_shape), weight, bias, eps, saves)


def widened_by_autocast(x: torch.Tensor) -> bool:
    """Autocast runs norms in float32, except on CPU, where it leaves them alone."""
    return x.device.type != "cpu" and conditions.compute_dtype(x) is not None


def is_short(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


def wide(t: torch.Tensor | None) -> Any:
    """float32 of what is shorter."""
    return t.float() if t is not None and is_short(t.dtype) else t


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        shape: list[int],
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        saves: str,
    ) -> torch.Tensor:
        ctx.shape, ctx.eps, ctx.saves, ctx.dtype = shape, eps, saves, x.dtype
        ctx.widened = widened_by_autocast(x)
        y, mean, rstd = _forward(x, shape, weight, bias, eps)
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
                found = differentiable_again(_original(ctx.shape, ctx.eps, ctx.widened), inputs, needed, g)
            elif mean is not None and _as_torch_does(g, kept, weight):
                backward = torch.ops.aten.native_layer_norm_backward.default
                found = backward(g, kept, ctx.shape, mean, rstd, weight, bias, needed)
            else:
                found = layer_norm_backward(g, kept, ctx.shape, mean, rstd, weight, bias, ctx.dtype, needed)
        dx, dw, db = (t if need else None for t, need in zip(found, needed, strict=True))
        return dx, None, dw, db, None, None


def _forward(
    x: torch.Tensor, shape: list[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> Found:
    if kernels.wanted("layer_norm", x) and x.numel():
        return layer_norm_kernel(x, shape, weight, bias, eps)
    if x.device.type == "cpu" and is_short(x.dtype):
        # the kernel keeps its statistics in the type of the weights; its result is the same
        weight = torch.ones(shape, dtype=torch.float32, device=x.device) if weight is None else weight
        weight, bias = wide(weight), wide(bias)
    return torch.ops.aten.native_layer_norm.default(x, shape, weight, bias, eps)


def _as_torch_does(g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """Whether torch's kernel takes these, and sums in float32."""
    alike = g.dtype == x.dtype and (weight is None or weight.dtype == x.dtype)
    return alike and not (x.device.type == "cpu" and is_short(x.dtype)) and not kernels.wanted("layer_norm", x)


def _original(shape: list[int], eps: float, widened: bool) -> Any:
    def run(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        if widened:
            x, weight, bias = wide(x), wide(weight), wide(bias)
        return F.layer_norm(x, shape, weight, bias, eps)

    return run


def row_chunks(rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """Rows whose float32 copies stay small."""
    step = max(_CHUNK.get(device.type, 1 << 24) // max(width, 1), 1)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _backward(
    g: torch.Tensor,
    kept: torch.Tensor,
    shape: list[int],
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    needed: list[bool],
) -> Found:
    """``kept`` is the input, or without ``mean`` the output."""
    kind, rows = rstd.dtype, rstd.numel()
    width = kept.numel() // rows if rows else 0
    if kernels.wanted("layer_norm", kept) and mean is not None and kept.numel():
        return kernels.layer_norm_backward(g, kept, mean, rstd, weight, bias, dtype, needed)
    w, b = (None if t is None else t.reshape(-1).to(kind) for t in (weight, bias))
    flat, gradients, rstd = kept.reshape(rows, width), g.reshape(rows, width), rstd.reshape(rows, 1)
    results = empty_results(kept, weight, bias, dtype, needed)
    sums = [torch.zeros_like(t) if need and t is not None else None for t, need in zip((w, b), needed[1:], strict=True)]
    backward = torch.ops.aten.native_layer_norm_backward.default
    for part in row_chunks(rows, width, kept.device):
        x, along, scale = flat[part].to(kind), gradients[part].to(kind), rstd[part]
        if mean is None:
            x = invertible.normalised(x, w, b)
            center, unit = torch.zeros_like(scale), torch.ones_like(scale)
        else:
            center, unit = mean.reshape(rows, 1)[part], scale
        dx, *others = backward(along, x, [width], center, unit, w, b, needed)
        if needed[0]:
            results[0].view(rows, width)[part] = dx.mul_(scale) if mean is None else dx
        for total, found in zip(sums, others, strict=True):
            if total is not None:
                total += found
    for result, total in zip(results[1:], sums, strict=True):
        if total is not None:
            result.view(-1).copy_(total)
    return results


def empty_results(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype, needed: Sequence[bool]
) -> Found:
    """Room for the gradients; empty for those that nobody needs. That of ``x`` is contiguous."""

    def room(t: torch.Tensor | None, kind: torch.dtype, need: bool) -> torch.Tensor:
        return x.new_empty(t.shape if need and t is not None else (0,), dtype=kind)

    kinds = (dtype, *(dtype if t is None else t.dtype for t in (weight, bias)))
    first, second, third = (room(*of) for of in zip((x, weight, bias), kinds, needed, strict=True))
    return first, second, third


def _kernel(
    x: torch.Tensor, shape: list[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> Found:
    return kernels.layer_norm_forward(x, shape, weight, bias, eps)


def _fake_backward(
    g: torch.Tensor,
    kept: torch.Tensor,
    shape: Any,
    mean: Any,
    rstd: Any,
    weight: Any,
    bias: Any,
    dtype: Any,
    needed: Any,
) -> Any:
    return empty_results(kept, weight, bias, dtype, needed)


def _fake_kernel(x: torch.Tensor, shape: Any, weight: Any, bias: Any, eps: Any) -> Any:
    statistic = x.new_empty(
        (*x.shape[: x.dim() - len(shape)], *(1 for _ in shape)),
        dtype=torch.float64 if x.dtype == torch.float64 else torch.float32,
    )
    return x.new_empty(x.shape), statistic, torch.empty_like(statistic)


layer_norm_backward = _bits.register(
    "layer_norm_backward(Tensor g, Tensor kept, SymInt[] shape, Tensor? mean, Tensor rstd, Tensor? weight, "
    "Tensor? bias, ScalarType dtype, bool[] needed) -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
layer_norm_kernel = _bits.register(
    "layer_norm_kernel(Tensor x, SymInt[] shape, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
    _kernel,
    _fake_kernel,
)
