"""RMSNorm from its input or its output and one float32 number per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from gradstow.layers.ops import _bits
from gradstow.layers.ops import _conditions as conditions
from gradstow.layers.ops import _invertible as invertible
from gradstow.layers.ops._again import differentiable_again
from gradstow.layers.ops._layer_norm import empty_results, row_chunks, wide, widened_by_autocast


def rms_norm(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    saves: str = "input",
) -> torch.Tensor:
    """``torch.nn.functional.rms_norm``; the forward is bit-equal in float32 and float64.

    Shapes: ``x`` (..., *normalized_shape), ``weight`` normalized_shape.

    Kept for the backward: ``x`` as it was given (under autocast too) and one float32 number per row (float64 for
    float64), where PyTorch on CPU keeps two more tensors of the input's size in float32. With ``saves="output"`` the
    output instead of ``x``; the normalised input is then made again as ``output / weight``, with an error of at most
    ``u |output / weight|``, u being half a unit in the last place of the output's type.

    The weight's gradient is summed in float32 for bfloat16 and float16 too, of which a part at a time is taken in
    float32.

    Raises:
        PolicyError: for another ``saves``.
        InvertibleError: with "output", where a weight is zero.
        DoubleBackwardError: with "output", for a gradient that is to be differentiated again.
    """
    invertible.check_saves(saves)
    if not conditions.lean_runs(x, weight):
        return F.rms_norm(x, normalized_shape, weight, eps)
    return _RMSNorm.apply(x, list(normalized_shape), weight, eps, saves)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, shape: list[int], weight: torch.Tensor | None, eps: float | None, saves: str
    ) -> torch.Tensor:
        ctx.shape, ctx.eps, ctx.saves, ctx.dtype = shape, eps, saves, x.dtype
        ctx.widened = widened_by_autocast(x)
        y, rstd = _forward(x, shape, weight, eps, ctx.widened)
        if saves == "output":
            rstd = invertible.checked(rstd, weight, None, y.dtype)
        ctx.save_for_backward(y if saves == "output" else x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        kept, weight, rstd = ctx.saved_tensors
        needed = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        with conditions.without_autocast(kept):
            if torch.is_grad_enabled() and not _bits.is_traced():
                invertible.refuse_double_backward(ctx.saves)
                original = _original(ctx.shape, ctx.eps, ctx.widened)
                found = differentiable_again(original, (kept, weight), needed, g)
            elif ctx.saves == "input" and _as_torch_does(g, kept, weight):
                found = torch.ops.aten._fused_rms_norm_backward.default(g, kept, ctx.shape, rstd, weight, needed)
            else:
                found = rms_norm_backward(g, kept, rstd, weight, ctx.saves == "output", ctx.dtype, needed)
        dx, dw = (t if need else None for t, need in zip(found, needed, strict=True))
        return dx, None, dw, None, None


def _forward(
    x: torch.Tensor, shape: list[int], weight: torch.Tensor | None, eps: float | None, widened: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    result = x.dtype
    if widened:
        x, weight = wide(x), wide(weight)
        result = x.dtype
    elif x.device.type != "cpu" and weight is not None and weight.dtype != x.dtype:
        x, weight = wide(x), wide(weight)  # the fused kernel wants one type; torch takes several ops there
    y, rstd = torch.ops.aten._fused_rms_norm.default(x, shape, weight, eps)
    return y.to(result), rstd


def _as_torch_does(g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """Whether torch has a kernel for these; on CUDA it sums in float32."""
    return x.is_cuda and g.dtype == x.dtype and (weight is None or weight.dtype == x.dtype)


def _original(shape: list[int], eps: float | None, widened: bool) -> Any:
    def run(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if widened:
            x, weight = wide(x), wide(weight)
        return F.rms_norm(x, shape, weight, eps)

    return run


def _backward(
    g: torch.Tensor,
    kept: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    from_output: bool,
    dtype: torch.dtype,
    needed: list[bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    """With ``n`` the normalised input: ``dw = sum(g n)`` and ``dx = rstd (g w - n mean(g w n))``."""
    kind, rows = rstd.dtype, rstd.numel()
    width = kept.numel() // rows if rows else 0
    w = None if weight is None else weight.reshape(-1).to(kind)
    flat, gradients, scales = kept.reshape(rows, width), g.reshape(rows, width), rstd.reshape(rows, 1)
    dx, dw, _ = empty_results(kept, weight, None, dtype, (*needed, False))
    total = torch.zeros_like(w) if needed[1] and w is not None else None
    for part in row_chunks(rows, width, kept.device):
        x, along, scale = flat[part].to(kind), gradients[part].to(kind), scales[part]
        n = invertible.normalised(x, w, None) if from_output else x * scale
        if total is not None:
            total += (along * n).sum(0)
        if needed[0]:
            along = along if w is None else along * w
            mean = (along * n).mean(1, keepdim=True)
            dx.view(rows, width)[part] = torch.addcmul(along, n, mean, value=-1).mul_(scale)
    if total is not None:
        dw.view(-1).copy_(total)
    return dx, dw


def _fake_backward(
    g: torch.Tensor, kept: torch.Tensor, rstd: Any, weight: Any, from_output: Any, dtype: Any, needed: Any
) -> Any:
    return empty_results(kept, weight, None, dtype, (*needed, False))[:2]


rms_norm_backward = _bits.register(
    "rms_norm_backward(Tensor g, Tensor kept, Tensor rstd, Tensor? weight, bool from_output, ScalarType dtype, "
    "bool[] needed) -> (Tensor, Tensor)",
    _backward,
    _fake_backward,
)
