"""Max-pooling that keeps, for each output, which place of its window was the largest: 4 or 8 bits.

torch's kernels run forward and backward. Their index into the input's plane is the window's corner, which follows from
where the output lies, and the step to the place within the window; only the number of that step is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from gradstow.layers.ops import _bits

aten = torch.ops.aten

_LARGEST = 256  # elements of a window


@functools.lru_cache(maxsize=64)
def _steps(window: tuple[int, ...], width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The step in the plane of each place of the window, for all that the code can hold, and for each step a place
    that has it."""
    tall, wide, *_, down, right = window
    rows, columns = torch.arange(tall) * down * width, torch.arange(wide) * right
    steps = (rows.unsqueeze(1) + columns).flatten()
    places = torch.zeros(int(steps.max()) + 1, dtype=torch.uint8)
    places[steps] = torch.arange(tall * wide, dtype=torch.uint8)
    every = torch.nn.functional.pad(steps, (0, (16 if len(steps) <= 16 else _LARGEST) - len(steps)))
    return every.to(device), places.to(device)


def _corners(like: torch.Tensor, window: Sequence[int], width: int) -> torch.Tensor:
    """Where each window begins in its plane; it may lie outside."""
    (height_out, width_out), (down, right, above, left) = like.shape[-2:], window[2:6]
    rows = torch.arange(height_out, device=like.device).mul_(down).sub_(above).mul_(width)
    return rows.unsqueeze(1) + torch.arange(width_out, device=like.device).mul_(right).sub_(left)


def _batches(samples: int, each: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Some samples at a time on CPU, an even number so that no byte is cut, and enough for all threads."""
    size = max(2 * torch.get_num_threads(), (1 << 18) // max(each, 1) // 2 * 2)
    size = size if device.type == "cpu" else max(samples, 1)
    for start in range(0, samples, size):
        yield start, min(start + size, samples)


def _pool_codes(indices: torch.Tensor, width: int, window: Sequence[int]) -> torch.Tensor:
    if indices.dim() == 3:
        indices = indices.unsqueeze(0)
    numel, each = indices.numel(), indices[0].numel() if len(indices) else 0
    _, places = _steps(tuple(window), width, indices.device)
    corners = _corners(indices, window, width)
    code = indices.new_empty(numel + numel % 2, dtype=torch.uint8)
    code[numel:] = 0
    for start, end in _batches(len(indices), each, indices.device):
        step = _bits.in_order(indices[start:end] - corners, indices.stride()).clamp_(0, len(places) - 1)
        torch.index_select(places, 0, step, out=code[start * each : end * each])
    if window[0] * window[1] > 16:
        return code[:numel].clone() if numel % 2 else code
    halves = indices.new_empty(len(code) // 2, dtype=torch.uint8)
    for start, end in _bits.pieces(len(halves), indices.device):
        pairs = code[2 * start : 2 * end].view(torch.int16)
        halves[start:end] = pairs.bitwise_right_shift(4).bitwise_or_(pairs)
    return halves


def _indices(
    code: torch.Tensor,
    start: int,
    shape: Sequence[int],
    stride: Sequence[int],
    size: Sequence[int],
    window: Sequence[int],
) -> torch.Tensor:
    """torch's indices again, of as many samples as ``shape`` has, from the element ``start`` on.

    Whatever the code holds, they lie within the plane: torch's kernel writes where they say, unchecked.
    """
    result = torch.empty_strided(shape, stride, dtype=torch.int64, device=code.device)
    numel = result.numel()
    if window[0] * window[1] > 16:
        places = code[start : start + numel]
    else:
        pairs = code[start // 2 : (start + numel + 1) // 2].to(torch.int16)
        places = pairs.bitwise_and(0xF0).bitwise_left_shift_(4).bitwise_or_(pairs.bitwise_and_(0xF))
        places = places.view(torch.uint8)[:numel]
    height, width = size[-2:]
    steps, _ = _steps(tuple(window), width, code.device)
    torch.index_select(steps, 0, places.int(), out=result.as_strided((numel,), (1,)))
    return result.add_(_corners(result, window, width)).clamp_(0, height * width - 1)


def _pool_gradient(gradient: torch.Tensor, code: torch.Tensor, size: Sequence[int], stride: Sequence[int],
                   channels_last: bool, window: Sequence[int], ceil_mode: bool) -> torch.Tensor:  # fmt: skip
    result = _fake_gradient(gradient, code, size, stride, channels_last, window, ceil_mode)
    whole = result
    if gradient.dim() == 3:
        gradient, result, stride = gradient.unsqueeze(0), result.unsqueeze(0), (gradient.numel(), *stride)
    each = gradient[0].numel() if len(gradient) else 0
    geometry = [list(window[i : i + 2]) for i in range(0, 8, 2)]
    for start, end in _batches(len(gradient), each, gradient.device):
        part, into = gradient[start:end], result[start:end]
        indices = _indices(code, start * each, part.shape, stride, size, window)
        # of the pooled tensor the kernel reads sizes and layout, for which its own result will do
        backward = aten.max_pool2d_with_indices_backward.grad_input
        backward(part, into, *geometry, ceil_mode, indices, grad_input=into)
    return whole


def _fake_codes(indices: torch.Tensor, width: int, window: Sequence[int]) -> torch.Tensor:
    numel = indices.numel()
    return indices.new_empty(numel if window[0] * window[1] > 16 else (numel + 1) // 2, dtype=torch.uint8)


def _fake_gradient(gradient: torch.Tensor, code: torch.Tensor, size: Sequence[int], stride: Sequence[int],
                   channels_last: bool, window: Sequence[int], ceil_mode: bool) -> torch.Tensor:  # fmt: skip
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(size, dtype=gradient.dtype, device=gradient.device, memory_format=layout)


pool_codes = _bits.register(
    "pool_codes(Tensor indices, SymInt width, int[] window) -> Tensor", _pool_codes, _fake_codes
)
pool_gradient = _bits.register(
    "pool_gradient(Tensor gradient, Tensor code, SymInt[] size, SymInt[] stride, bool channels_last, int[] window, "
    "bool ceil_mode) -> Tensor",
    _pool_gradient,
    _fake_gradient,
)


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(x: Any, tie: Any, window: Sequence[int], ceil_mode: bool) -> tuple[torch.Tensor, torch.Tensor]:
        geometry = [list(window[i : i + 2]) for i in range(0, 8, 2)]
        y, indices = aten.max_pool2d_with_indices.default(x, *geometry, ceil_mode)
        return y, pool_codes(indices, x.shape[-1], window)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        x, tie, window, ceil_mode = inputs
        y, code = output
        ctx.mark_non_differentiable(code)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(code, tie)
        ctx.options = (tuple(x.shape), tuple(y.stride()), _is_channels_last(y), window, ceil_mode)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None, _: None) -> tuple[torch.Tensor | None, ...]:
        if gradient is None:
            return None, None, None, None
        code, tie = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _PoolGradient.apply(gradient, code, tie, ctx.options), None, None, None
        return pool_gradient(gradient, code, *ctx.options), None, None, None


class _PoolGradient(torch.autograd.Function):
    """The gradient as a function of its own, for double backward: linear, and zero along the input."""

    @staticmethod
    def forward(gradient: Any, code: torch.Tensor, tie: Any, options: tuple[Any, ...]) -> torch.Tensor:
        return pool_gradient(gradient, code, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        gradient, code, tie, ctx.options = inputs
        ctx.shape = gradient.shape
        ctx.save_for_backward(code, tie)

    @staticmethod
    def backward(ctx: Any, along: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        code, tie = ctx.saved_tensors
        first = None
        if ctx.needs_input_grad[0]:
            size, stride, _, window, _ = ctx.options
            indices = _indices(code, 0, ctx.shape, stride, size, window)
            first = along.flatten(-2).gather(-1, indices.flatten(-2)).view(ctx.shape)
        return first, None, _bits.untied(tie) if ctx.needs_input_grad[2] else None, None


def _is_channels_last(y: torch.Tensor) -> bool:
    """Whether the kernel chose that layout; strides tell it where ``is_contiguous`` says both."""
    if y.dim() != 4:
        return False
    _, c, h, w = y.shape
    stride = tuple(y.stride())
    return stride == (c * h * w, 1, c * w, c) and stride != (c * h * w, h * w, w, 1)


def _pair(value: Any) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value) * (2 if len(value) == 1 else 1)


def _window(kernel_size: Any, stride: Any, padding: Any, dilation: Any) -> tuple[int, ...]:
    """Kernel, stride, padding and dilation, two numbers each."""
    stride = kernel_size if stride is None or stride == () or stride == [] else stride
    return (*_pair(kernel_size), *_pair(stride), *_pair(padding), *_pair(dilation))


def _knows(x: torch.Tensor, window: tuple[int, ...]) -> bool:
    """Whether the code holds any index that may come. Where dilation steps over the whole input, a window can be all
    padding, and what torch writes down for it is no place of the window."""
    if len(window) != 8 or x.dim() not in (3, 4) or not 0 < window[0] * window[1] <= _LARGEST:
        return False
    return all(window[4 + i] == 0 or window[6 + i] <= size for i, size in enumerate(x.shape[-2:]))  # padding, dilation


def max_pool2d(
    x: torch.Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> torch.Tensor:
    """Max-pooling that keeps, for n outputs, ceil(n / 2) bytes for windows of up to 16 elements, n for up to 256.

    ``x`` is (N, C, H, W) or (C, H, W); sizes are numbers or pairs. torch keeps the input and 8 n bytes. Outputs and
    gradients are equal to those of ``F.max_pool2d``: ties, NaN and layouts too. Larger windows run as torch's own, and
    errors are torch's.
    """
    window = _window(kernel_size, stride, padding, dilation)
    if not _bits.is_lean(x) or not _knows(x, window):
        return F.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)
    return _MaxPool.apply(x, _bits.tie(x), window, ceil_mode)[0]


def max_pool1d(
    x: torch.Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> torch.Tensor:
    """``max_pool2d`` of one row: ``x`` is (N, C, L) or (C, L); it keeps as many bytes."""
    values = (kernel_size, stride, padding, dilation)
    lone = [value[0] if isinstance(value, Sequence) and len(value) == 1 else value for value in values]
    plain = not _bits.is_lean(x) or x.dim() not in (2, 3) or not all(v is None or isinstance(v, int) for v in lone)
    if not plain:
        kernel, step, around, apart = lone
        rows: Any = ((1, kernel), None if step is None else (1, step), (0, around), (1, apart))
        plain = not _knows(x.unsqueeze(-2), _window(*rows))
    if plain:
        return F.max_pool1d(x, kernel_size, stride, padding, dilation, ceil_mode)
    return max_pool2d(x.unsqueeze(-2), rows[0], rows[1], rows[2], rows[3], ceil_mode).squeeze(-2)
