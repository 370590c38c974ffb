"""Double backward of a function that has a backward of its own: the original, run again on what was saved.

A backward written by hand cannot be differentiated where it goes through numbers that the forward computed outside of
autograd. Under ``create_graph=True`` PyTorch runs it with gradients enabled, and the saved inputs are then still part
of the graph: there the original function is run again and autograd differentiates it as often as anyone likes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def differentiable_again(
    original: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor | None],
    needed: Sequence[bool],
    gradient: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of ``original(*inputs)`` for the ``needed`` inputs (None for the others), themselves
    differentiable. To be called from a backward that finds gradients enabled, with saved tensors as ``inputs``.

    Memory is that of plain PyTorch: whoever differentiates a gradient keeps what that needs.
    """
    with torch.enable_grad():
        # where one input was made from another, its gradient must not flow on into that one here
        aliases = [None if x is None else x.view_as(x) for x in inputs]
        wanted = [x for x, need in zip(aliases, needed, strict=True) if need and x is not None]
        output = original(*aliases)
        found: Any = iter(torch.autograd.grad(output, wanted, gradient, create_graph=True, allow_unused=True))
    return tuple(next(found) if need and x is not None else None for x, need in zip(inputs, needed, strict=True))
