"""Linear cross entropy in tiles: a tile of logits lives in registers, and is folded into a running logsumexp.

The forward writes nothing of the logits' size. Its classes are split over programs, whose results are joined after. The
backward makes the gradient of a chunk of logits in the same tiles; the two products that follow are torch's own.
"""

# Triton has no types, and what a kernel takes are pointers and numbers.
# mypy: disable-error-code="import-untyped, no-untyped-def"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from gradstow.layers.ops.triton._launch import on_device

if TYPE_CHECKING:
    from gradstow.layers.ops._cross_entropy_chunks import Head, Sums

_TOKENS, _CLASSES = 64, 128  # of a tile of logits
_PROGRAMS = 256  # at least, where there are enough classes


@triton.jit
def logits_tile(
    x, weight, bias, row, column, tokens, classes, width, x_row, w_row, w_column,
    has_bias: tl.constexpr, tile_tokens: tl.constexpr, tile_classes: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    """In float32; outside of the classes they mean nothing."""
    total = tl.zeros([tile_tokens, tile_classes], dtype=tl.float32)
    for start in range(0, width, step):
        inner = start + tl.arange(0, step)
        left = tl.load(
            x + row.to(tl.int64)[:, None] * x_row + inner[None, :],
            mask=(row < tokens)[:, None] & (inner < width)[None, :],
            other=0.0,
        )
        right = tl.load(
            weight + column.to(tl.int64)[None, :] * w_row + inner[:, None] * w_column,
            mask=(column < classes)[None, :] & (inner < width)[:, None],
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision="ieee")
    if has_bias:
        total += tl.load(bias + column, mask=column < classes, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def forward_kernel(
    x, weight, bias, target, class_weight, highest, sums, taken, even,
    tokens, classes, width, x_row, w_row, w_column, each, splits,
    has_bias: tl.constexpr, has_class_weight: tl.constexpr, with_even: tl.constexpr,
    tile_tokens: tl.constexpr, tile_classes: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    """For tokens and a part of the classes: the highest logit, the sum of exponentials above it, the target's logit
    (0 where it is not in this part), and the (weighted) sum of logits."""
    row = tl.program_id(0) * tile_tokens + tl.arange(0, tile_tokens)
    first = tl.program_id(1) * each
    wanted = tl.load(target + row, mask=row < tokens, other=-1)
    top = tl.full([tile_tokens], float("-inf"), dtype=tl.float32)
    total = tl.zeros([tile_tokens], dtype=tl.float32)
    hit = tl.zeros([tile_tokens], dtype=tl.float32)
    all_of = tl.zeros([tile_tokens], dtype=tl.float32)
    for start in range(first, tl.minimum(first + each, classes), tile_classes):
        column = start + tl.arange(0, tile_classes)
        inside = (column < classes)[None, :]
        logits = logits_tile(
            x, weight, bias, row, column, tokens, classes, width, x_row, w_row, w_column,
            has_bias, tile_tokens, tile_classes, step,
        )  # fmt: skip
        hit += tl.sum(tl.where(column[None, :] == wanted[:, None], logits, 0.0), 1)
        if with_even:
            weighted = logits
            if has_class_weight:
                weighted = logits * tl.load(class_weight + column, mask=column < classes, other=0.0)[None, :]
            all_of += tl.sum(tl.where(inside, weighted, 0.0), 1)
        logits = tl.where(inside, logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # else infinity less infinity
        total = total * tl.exp(top - base) + tl.sum(tl.exp(logits - base[:, None]), 1)
        top = higher
    place = row.to(tl.int64) * splits + tl.program_id(1)
    tl.store(highest + place, top, mask=row < tokens)
    tl.store(sums + place, total, mask=row < tokens)
    tl.store(taken + place, hit, mask=row < tokens)
    if with_even:
        tl.store(even + place, all_of, mask=row < tokens)


@triton.jit
def gradient_kernel(
    x, weight, bias, target, class_weight, lse, scale, hit, each_class, gradient,
    tokens, classes, width, x_row, w_row, w_column,
    has_bias: tl.constexpr, has_class_weight: tl.constexpr, with_even: tl.constexpr,
    tile_tokens: tl.constexpr, tile_classes: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    """``scale softmax(logits) - hit onehot(target) - each_class class_weight``."""
    row = tl.program_id(0) * tile_tokens + tl.arange(0, tile_tokens)
    column = tl.program_id(1) * tile_classes + tl.arange(0, tile_classes)
    logits = logits_tile(
        x, weight, bias, row, column, tokens, classes, width, x_row, w_row, w_column,
        has_bias, tile_tokens, tile_classes, step,
    )  # fmt: skip
    known = row < tokens
    result = tl.exp(logits - tl.load(lse + row, mask=known, other=0.0)[:, None])
    result *= tl.load(scale + row, mask=known, other=0.0)[:, None]
    if with_even:
        evenly = tl.load(each_class + row, mask=known, other=0.0)[:, None]
        if has_class_weight:
            evenly = evenly * tl.load(class_weight + column, mask=column < classes, other=0.0)[None, :]
        result -= evenly
    wanted = tl.load(target + row, mask=known, other=-1)
    result -= tl.where(column[None, :] == wanted[:, None], tl.load(hit + row, mask=known, other=0.0)[:, None], 0.0)
    at = row.to(tl.int64)[:, None] * classes + column[None, :]
    tl.store(gradient + at, result.to(gradient.dtype.element_ty), mask=known[:, None] & (column < classes)[None, :])


def forward(head: Head) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and logsumexps."""
    x = head.x.to(head.dtype).contiguous()
    tokens = x.shape[0]
    blocks = triton.cdiv(tokens, _TOKENS)
    splits = max(min(triton.cdiv(_PROGRAMS, max(blocks, 1)), triton.cdiv(head.classes, _CLASSES)), 1)
    each = triton.cdiv(triton.cdiv(head.classes, splits), _CLASSES) * _CLASSES
    highest, sums, taken, even = (x.new_zeros((tokens, splits), dtype=torch.float32) for _ in range(4))
    if tokens:
        with on_device(x):
            forward_kernel[(blocks, splits)](
                x, head.weight, _or(head.bias, x), head.target, _or(head.class_weight, x), highest, sums, taken, even,
                *_sizes(head, x), each, splits, *_switches(head), *_tiles(x),
            )  # fmt: skip
    top = highest.amax(1)
    log = (sums * (highest - top.unsqueeze(1)).exp()).sum(1).log()
    lse = top + log
    # of logits above the highest: large ones would cancel
    loss = (head.hit + head.even) * log - head.hit * (taken.sum(1) - top)
    if head.smoothing:
        loss -= head.smoothing / head.classes * even.sum(1) - head.even * top
    if head.z:
        loss += head.z * lse.square()
    return loss.masked_fill_(~head.valid, 0.0), lse


def backward(head: Head, sums: Sums, lse: torch.Tensor, factor: torch.Tensor) -> None:
    """Adds to ``sums``, a chunk of tokens at a time."""
    scale = (head.hit + head.even + 2 * head.z * lse) * factor
    hit, each = head.hit * factor, head.smoothing / head.classes * factor
    buffer = head.weight.new_empty((min(head.chunk, head.x.shape[0]), head.classes))
    for start in range(0, head.x.shape[0], head.chunk):
        part = slice(start, min(start + head.chunk, head.x.shape[0]))
        x = head.x[part].to(head.dtype).contiguous()
        gradient = buffer[: x.shape[0]]
        grid = (triton.cdiv(x.shape[0], _TOKENS), triton.cdiv(head.classes, _CLASSES))
        with on_device(x):
            gradient_kernel[grid](
                x, head.weight, _or(head.bias, x), head.target[part], _or(head.class_weight, x),
                lse[part], scale[part], hit[part], each[part], gradient,
                *_sizes(head, x), *_switches(head), *_tiles(x),
            )  # fmt: skip
        sums.add_rows(gradient)
        sums.add_chunk(part, x, gradient)


def _or(t: torch.Tensor | None, stand_in: torch.Tensor) -> torch.Tensor:
    """A kernel's switch says that it does not read this one."""
    return stand_in if t is None else t.contiguous()


def _sizes(head: Head, x: torch.Tensor) -> tuple[int, ...]:
    return x.shape[0], head.classes, head.width, x.stride(0), head.weight.stride(0), head.weight.stride(1)


def _switches(head: Head) -> tuple[bool, bool, bool]:
    return head.bias is not None, head.class_weight is not None, bool(head.smoothing)


def _tiles(x: torch.Tensor) -> tuple[int, int, int]:
    return _TOKENS, _CLASSES, 32 if x.dtype == torch.float32 else 64
