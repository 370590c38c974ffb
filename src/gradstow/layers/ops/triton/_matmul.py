"""A matrix product by tiles, with bias, ReLU and ReLU's 1-bit mask made before a tile is written.

Triton keeps the tiles of both factors in shared memory, several steps ahead; sums are float32.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from gradstow._errors import GradstowError
from gradstow._ops import above_bits
from gradstow.layers.ops.triton._launch import on_device

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_TILE = {"rows": 64, "columns": 64, "inner": 32, "group": 8}


@triton.jit
def kernel(
    left, right, bias, result, code,
    m, n, k,
    left_row, left_inner, right_row, right_inner,
    has_bias: tl.constexpr, relu: tl.constexpr, bits: tl.constexpr, precision: tl.constexpr, widen: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, inner: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    """``result[i, j] = sum_l left[i, l] right[j, l]``; neighbouring programs share factors in the L2 cache."""
    place = tl.program_id(0)
    down, across = tl.cdiv(m, rows), tl.cdiv(n, columns)
    first = place // (group * across) * group
    height = tl.minimum(down - first, group)
    tile_row = first + place % (group * across) % height
    tile_column = place % (group * across) // height
    i = (tile_row * rows + tl.arange(0, rows)).to(tl.int64)
    j = (tile_column * columns + tl.arange(0, columns)).to(tl.int64)
    inside = (i[:, None] < m) & (j[None, :] < n)
    total = tl.zeros([rows, columns], dtype=tl.float32)
    for start in range(0, k, inner):
        steps = (start + tl.arange(0, inner)).to(tl.int64)
        lefts = tl.load(
            left + i[:, None] * left_row + steps[None, :] * left_inner,
            mask=(i[:, None] < m) & (steps[None, :] < k), other=0.0,
        )  # fmt: skip
        rights = tl.load(
            right + j[None, :] * right_row + steps[:, None] * right_inner,
            mask=(j[None, :] < n) & (steps[:, None] < k), other=0.0,
        )  # fmt: skip
        if widen:  # the interpreter multiplies bfloat16 as the integers that it keeps it in
            lefts, rights = lefts.to(tl.float32), rights.to(tl.float32)
        total = tl.dot(lefts, rights, total, input_precision=precision)
    if has_bias:
        total += tl.load(bias + j, mask=j < n, other=0.0).to(tl.float32)[None, :]
    if relu:
        total = tl.where(total <= 0, 0.0, total)  # NaN stays
    rounded = total.to(result.dtype.element_ty)
    tl.store(result + i[:, None] * n + j[None, :], rounded, mask=inside)
    if bits:  # n is a multiple of 8: a byte is of one row
        kept = tl.where((rounded.to(tl.float32) <= 0) | (j[None, :] >= n), 0, 1)
        eights = tl.reshape(kept, [rows, columns // 8, 8]) << tl.arange(0, 8)[None, None, :]
        j8 = (tile_column * (columns // 8) + tl.arange(0, columns // 8)).to(tl.int64)
        packed = tl.sum(eights, axis=2).to(tl.uint8)
        tl.store(code + i[:, None] * (n // 8) + j8[None, :], packed, mask=(i[:, None] < m) & (j8[None, :] < n // 8))


def linear_relu(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    relu: bool = True,
    bits: bool = True,
    tile: dict[str, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``relu(input @ weight.T + bias)``, and where it is positive, as bits.

    ``input`` (M, K) and ``weight`` (N, K) of one type, float32, bfloat16 or float16, of any strides; ``bias`` (N,).
    Gives (M, N), contiguous, in that type and, with ``bits``, ceil(M N / 8) bytes as ``gradstow::above_bits`` makes of
    the result. Sums are float32; float32 factors are multiplied as TF32 only where
    ``torch.backends.cuda.matmul.allow_tf32`` says so. No memory is needed besides. Where N is not a multiple of 8 the
    bits take a pass of their own, because then a byte holds the end of one row and the start of the next.

    ``tile`` overrides the tile's ``rows``, ``columns``, ``inner`` (powers of two, at least 16) and ``group``.

    Raises:
        GradstowError: for other shapes or types, or ``bits`` without ``relu``.
    """
    _check(input, weight, bias, relu or not bits)
    (m, k), n = input.shape, weight.shape[0]
    result = input.new_empty((m, n))
    packed = bits and n % 8 == 0
    code = input.new_empty((m * n // 8,), dtype=torch.uint8) if packed else result  # which the kernel does not touch
    sizes = _TILE | (tile or {})
    if result.numel():
        grid = (triton.cdiv(m, sizes["rows"]) * triton.cdiv(n, sizes["columns"]),)
        exact = input.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
        with on_device(input):
            kernel[grid](
                input, weight, input if bias is None else bias.contiguous(), result, code, m, n, k,
                *input.stride(), *weight.stride(),
                has_bias=bias is not None, relu=relu, bits=packed, precision="ieee" if exact else "tf32",
                widen=not input.is_cuda, **sizes,
            )  # fmt: skip
    if not bits:
        return result, None
    return result, code if packed else above_bits(result, 0.0)


def _check(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, told: bool) -> None:
    given: list[Any] = [x for x in (input, weight, bias) if x is not None]
    text = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in given)
    if input.dim() != 2 or weight.dim() != 2 or input.shape[1] != weight.shape[1]:
        raise GradstowError(f"linear_relu takes (M, K), (N, K) and perhaps (N,), not {text}. Flatten the input first.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise GradstowError(f"linear_relu takes (M, K), (N, K) and perhaps (N,), not {text}. Check the bias.")
    if input.dtype not in _TYPES or len({x.dtype for x in given}) > 1 or len({x.device for x in given}) > 1:
        raise GradstowError(f"linear_relu needs one of {_TYPES} on one device, not {text}. Convert the inputs.")
    if not told:
        raise GradstowError("bits say where a ReLU lets through, and relu=False. Leave out the bits or take the ReLU.")
