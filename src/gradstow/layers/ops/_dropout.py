"""Dropout that keeps one bit per element: torch's own random numbers and results, its noise packed.

On CPU torch draws the noise in the type and the memory order of the input and keeps it, 4 bytes per element; on other
devices its fused kernel keeps a bool. Both run here as they are, and what they keep becomes bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from gradstow.layers.ops import _bits

aten = torch.ops.aten


def _dropout_bits(x: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    if x.device.type != "cpu":
        y, mask = aten.native_dropout.default(x, p, True)
        return y, _bits.packed(_bits.in_order(mask, y.stride()))
    noise = torch.empty_like(x).bernoulli_(1 - p)
    if _bits.same_order(x, noise.stride()):
        code = _bits.packed(_bits.in_order(noise, noise.stride()))
        return noise.div_(1 - p).mul_(x), code
    y = x * noise.div_(1 - p)
    return y, _bits.packed(_bits.in_order(noise, y.stride()))


def _dropout_over(x: torch.Tensor, p: float) -> torch.Tensor:
    """In place; the bits. torch has no fused kernel for it on any device."""
    noise = torch.empty_like(x).bernoulli_(1 - p)
    code = _bits.packed(_bits.in_order(noise, x.stride()))
    x.mul_(noise.div_(1 - p))
    return code


def _dropout_gradient(
    gradient: torch.Tensor, code: torch.Tensor, stride: Sequence[int], p: float, fused: bool
) -> torch.Tensor:
    numel, dtype, device = gradient.numel(), gradient.dtype, gradient.device
    if fused:
        mask = torch.empty_strided(gradient.shape, stride, dtype=torch.bool, device=device)
        mask.as_strided((numel,), (1,)).copy_(_bits.unpacked(code, 0, numel))
        return aten.native_dropout_backward.default(gradient, mask, 1.0 / (1.0 - p))
    kept = torch.ones((), dtype=dtype, device=device).div_(1 - p)  # what the noise is where it is not zero
    if not _bits.same_order(gradient, stride):  # how the product then lies in memory is the kernel's to say
        noise = gradient.new_empty_strided(gradient.shape, stride)
        flat = noise.as_strided((numel,), (1,))
        for start, end in _bits.pieces(numel, device):
            torch.mul(_bits.numbers(code, start, end, dtype), kept, out=flat[start:end])
        return gradient * noise
    result = torch.empty_like(gradient)
    source, target = _bits.in_order(gradient, stride), _bits.in_order(result, stride)
    for start, end in _bits.pieces(numel, device):
        noise = _bits.numbers(code, start, end, dtype).mul_(kept)
        torch.mul(source[start:end], noise, out=target[start:end])
    return result


def _fake_dropout(x: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * torch.empty_like(x)
    return y, x.new_empty(_bits.code_bytes(x.numel()), dtype=torch.uint8)


def _fake_gradient(
    gradient: torch.Tensor, code: torch.Tensor, stride: Sequence[int], p: float, fused: bool
) -> torch.Tensor:
    if _bits.same_order(gradient, stride):
        return torch.empty_like(gradient)
    return gradient * gradient.new_empty_strided(gradient.shape, stride)


dropout_bits = _bits.register(
    "dropout_bits(Tensor x, float p) -> (Tensor, Tensor)",
    _dropout_bits,
    _fake_dropout,
    (torch.Tag.nondeterministic_seeded,),
)
dropout_gradient = _bits.register(
    "dropout_gradient(Tensor gradient, Tensor code, SymInt[] stride, float p, bool fused) -> Tensor",
    _dropout_gradient,
    _fake_gradient,
)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, p: float, inplace: bool) -> tuple[torch.Tensor, torch.Tensor]:
        if not inplace:
            return dropout_bits(x, p)
        return x, _dropout_over(x, p)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        x, ctx.p, inplace = inputs
        y, code = output
        if inplace:
            ctx.mark_dirty(x)
        ctx.mark_non_differentiable(code)
        ctx.set_materialize_grads(False)
        ctx.stride, ctx.fused = y.stride(), not inplace and x.device.type != "cpu"
        ctx.save_for_backward(code)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None, _: None) -> tuple[torch.Tensor | None, None, None]:
        if gradient is None:
            return None, None, None
        (code,) = ctx.saved_tensors
        return _dropped_gradient(gradient, code, ctx), None, None


class _DropoutGradient(torch.autograd.Function):
    """The gradient as a function of its own, for double backward: linear, its own derivative."""

    @staticmethod
    def forward(gradient: Any, code: torch.Tensor, stride: Sequence[int], p: float, fused: bool) -> torch.Tensor:
        return dropout_gradient(gradient, code, stride, p, fused)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, code, ctx.stride, ctx.p, ctx.fused = inputs
        ctx.save_for_backward(code)

    @staticmethod
    def backward(ctx: Any, along: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (code,) = ctx.saved_tensors
        return _dropped_gradient(along, code, ctx), None, None, None, None


def _dropped_gradient(gradient: torch.Tensor, code: torch.Tensor, ctx: Any) -> torch.Tensor:
    if torch.is_grad_enabled():
        return _DropoutGradient.apply(gradient, code, ctx.stride, ctx.p, ctx.fused)
    return dropout_gradient(gradient, code, ctx.stride, ctx.p, ctx.fused)


def dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Dropout that keeps one bit per element, ceil(n / 8) bytes.

    Any shape and floating type. The random numbers, the output, its gradients and the state of the generator afterwards
    are those of ``F.dropout`` on the same device, in compiled code too. Nothing is kept at p = 0 and p = 1. In place on
    a leaf, a view, or in compiled code, torch's own runs; errors are torch's.
    """
    lean = _bits.is_lean(x) and not _bits.is_expanded(x) and not (inplace and not _bits.may_overwrite(x))
    if not training or not 0 < p < 1 or not lean or x.numel() == 0:
        return F.dropout(x, p, training, inplace)
    return _Dropout.apply(x, p, inplace)[0]
