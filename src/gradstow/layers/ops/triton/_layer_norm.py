"""LayerNorm's forward and backward, in float32 whatever the types are. Rows are read in blocks, of any width.

The weight's and bias's gradients are added up per group of rows, then over the groups: no atomics, always the same sum.
"""

# Triton has no types, and what a kernel takes are pointers and numbers.
# mypy: disable-error-code="import-untyped, no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from gradstow.layers.ops._layer_norm import Found, empty_results
from gradstow.layers.ops.triton._launch import on_device

_WIDEST = 4096  # elements of a row at a time
_ROWS, _COLUMNS = 16, 128  # of a tile of the weight's gradient
_GROUPS = 64  # at most


@triton.jit
def forward_kernel(
    x, weight, bias, y, mean, rstd, width, eps, has_weight: tl.constexpr, has_bias: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([block], dtype=tl.float32)
    for start in range(0, width, block):
        columns = start + tl.arange(0, block)
        total += tl.load(x + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
    center = tl.sum(total, 0) / width
    total = tl.zeros([block], dtype=tl.float32)
    for start in range(0, width, block):
        columns = start + tl.arange(0, block)
        values = tl.load(x + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
        apart = tl.where(columns < width, values - center, 0.0)
        total += apart * apart
    scale = 1.0 / tl.sqrt(tl.sum(total, 0) / width + eps)
    tl.store(mean + row, center)
    tl.store(rstd + row, scale)
    for start in range(0, width, block):
        columns = start + tl.arange(0, block)
        inside = columns < width
        result = (tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32) - center) * scale
        if has_weight:
            result *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        if has_bias:
            result += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + row * width + columns, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def input_kernel(g, x, mean, rstd, weight, dx, width, has_weight: tl.constexpr, block: tl.constexpr):
    """``dx = rstd (g w - mean(g w) - n mean(g w n))``, n being the normalised input."""
    row = tl.program_id(0).to(tl.int64)
    center, scale = tl.load(mean + row), tl.load(rstd + row)
    plain = tl.zeros([block], dtype=tl.float32)
    along = tl.zeros([block], dtype=tl.float32)
    for start in range(0, width, block):
        columns = start + tl.arange(0, block)
        inside = columns < width
        n = (tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32) - center) * scale
        gradient = tl.load(g + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        if has_weight:
            gradient *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        plain += gradient
        along += gradient * n
    first, second = tl.sum(plain, 0) / width, tl.sum(along, 0) / width
    for start in range(0, width, block):
        columns = start + tl.arange(0, block)
        inside = columns < width
        n = (tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32) - center) * scale
        gradient = tl.load(g + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        if has_weight:
            gradient *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        result = (gradient - first - n * second) * scale
        tl.store(dx + row * width + columns, result.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def weight_kernel(
    g, x, mean, rstd, dw, db, rows, width, each, tile_rows: tl.constexpr, tile_columns: tl.constexpr
):  # fmt: skip
    """Sums over ``each`` rows: a row of ``dw`` and of ``db`` per group of rows."""
    columns = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)
    group = tl.program_id(1)
    for_weight = tl.zeros([tile_columns], dtype=tl.float32)
    for_bias = tl.zeros([tile_columns], dtype=tl.float32)
    for start in range(0, each, tile_rows):
        row = group * each + start + tl.arange(0, tile_rows)
        known = (row < rows) & (start + tl.arange(0, tile_rows) < each)
        inside = known[:, None] & (columns < width)[None, :]
        at = row.to(tl.int64)[:, None] * width + columns[None, :]
        center = tl.load(mean + row, mask=known, other=0.0)[:, None]
        scale = tl.load(rstd + row, mask=known, other=0.0)[:, None]
        n = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - center) * scale
        gradient = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
        for_weight += tl.sum(gradient * n, 0)
        for_bias += tl.sum(gradient, 0)
    place = group.to(tl.int64) * width + columns
    tl.store(dw + place, for_weight, mask=columns < width)
    tl.store(db + place, for_bias, mask=columns < width)


def forward(
    x: torch.Tensor, shape: list[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> Found:
    x = x.contiguous()
    outer = x.shape[: x.dim() - len(shape)]
    rows = outer.numel()
    width = x.numel() // rows
    y = torch.empty_like(x)
    mean, rstd = (x.new_empty((*outer, *(1 for _ in shape)), dtype=torch.float32) for _ in range(2))
    weight, bias = (t if t is None else t.contiguous() for t in (weight, bias))
    given = (x, x if weight is None else weight, x if bias is None else bias, y, mean, rstd, width, eps)
    with on_device(x):
        forward_kernel[(rows,)](*given, weight is not None, bias is not None, _block(width))
    return y, mean, rstd


def backward(
    g: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    needed: list[bool],
) -> Found:
    g, x, mean, rstd = g.contiguous(), x.contiguous(), mean.contiguous(), rstd.contiguous()
    rows = rstd.numel()
    width = x.numel() // rows
    results = empty_results(x, weight, bias, dtype, needed)
    with on_device(x):
        if needed[0]:
            scale = x if weight is None else weight.contiguous()
            input_kernel[(rows,)](g, x, mean, rstd, scale, results[0], width, weight is not None, _block(width))
        if needed[1] or needed[2]:
            for result, found, need in zip(results[1:], _sums(g, x, mean, rstd, rows, width), needed[1:], strict=True):
                if need:
                    result.view(-1).copy_(found)
    return results


def _sums(g: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, rows: int, width: int) -> Any:
    groups = min(triton.cdiv(rows, _ROWS), _GROUPS)
    dw, db = (x.new_empty((groups, width), dtype=torch.float32) for _ in range(2))
    grid = (triton.cdiv(width, _COLUMNS), groups)
    weight_kernel[grid](g, x, mean, rstd, dw, db, rows, width, triton.cdiv(rows, groups), _ROWS, _COLUMNS)
    return dw.sum(0), db.sum(0)


def _block(width: int) -> int:
    return min(triton.next_power_of_2(width), _WIDEST)
