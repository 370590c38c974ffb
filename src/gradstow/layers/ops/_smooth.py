"""Smooth activations: nothing is kept but the input, and the gradient is computed again from it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from gradstow.layers.ops import _bits
from gradstow.layers.ops._again import differentiable_again


class _FromInput(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        y = function(x)
        return y.view_as(y) if y is x else y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, ctx.function = inputs
        kind = x.device.type
        ctx.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        if gradient is None:
            return None, None
        (x,) = ctx.saved_tensors
        with torch.autocast(*ctx.autocast) if ctx.autocast[2] else contextlib.nullcontext():
            if torch.is_grad_enabled():
                return differentiable_again(ctx.function, [x], [True], gradient)[0], None
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                y = ctx.function(x)
        return torch.autograd.grad(y, x, gradient)[0], None


def from_input(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """``function(x)`` that keeps ``x`` and nothing else for the backward, which runs ``function`` again.

    For activations that are written out in several ops, each of which keeps its own input: the tanh form of GELU as
    ``0.5 * x * (1 + torch.tanh(...))`` keeps five tensors, ``x * torch.sigmoid(1.702 * x)`` two.

    ``function`` must be elementwise or at least pure: the same numbers each time, no random ones, no parameters, no
    change of ``x``. Output and gradients are then equal to those of ``function``; the backward takes its memory and its
    time once more. Under ``torch.compile`` the function runs as it is, for the compiler decides itself what to keep.
    """
    if _bits.is_traced() or not _bits.is_lean(x):
        return function(x)
    return _FromInput.apply(x, function)


def logsigmoid(x: torch.Tensor) -> torch.Tensor:
    """``F.logsigmoid`` that keeps its input; torch keeps another tensor of that size on CPU."""
    return from_input(F.logsigmoid, x)


def softsign(x: torch.Tensor) -> torch.Tensor:
    """``F.softsign`` that keeps its input; torch keeps another tensor of that size."""
    return from_input(F.softsign, x)
