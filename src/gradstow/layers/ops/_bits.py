"""What the lean layers with masks share: bits in the order of memory, some at a time, and the tie to the input.

On CPU everything runs in pieces that stay in the cache, so the working memory beside the code is a mebibyte or so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from gradstow import _ops
from gradstow.layers.ops._conditions import lean_runs

LIBRARY = torch.library.Library("gradstow", "FRAGMENT")

_PIECE = 1 << 19  # elements, a multiple of 8 and of every vector register: measured, smaller ones cost calls


def register(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], tags: Sequence[torch.Tag] = ()) -> Any:
    """The operator of this schema, with a kernel for all devices and one that knows only shapes."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=tuple(tags))
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    LIBRARY.impl(name, fake, "Meta")
    return getattr(torch.ops.gradstow, name).default


def is_lean(x: torch.Tensor) -> bool:
    """Whether a backward will come and the lean functions know this kind of tensor; else the original runs."""
    return x.requires_grad and lean_runs(x)


def is_traced() -> bool:
    """Whether this code becomes part of a graph.

    Under ``gs.stow`` a model that asks ``torch.compiler.is_compiling`` hears False, so that it does what it does in
    plain PyTorch. What Dynamo itself answers is asked of its own module, which every optimizer imports too.
    """
    from torch._dynamo import external_utils

    return torch.compiler.is_compiling() or external_utils.is_compiling()


def may_overwrite(x: torch.Tensor) -> bool:
    """Whether a function of our own may change ``x``; if not, the original runs, in place.

    Leaves and views have rules of their own, which the original knows. Compiled code can get wrong gradients where a
    function changes an input of the graph (seen in torch 2.14: it counts the gradient of the result twice).
    """
    return not is_traced() and not x.is_leaf and not x._is_view() and is_dense(x)


def is_expanded(x: torch.Tensor) -> bool:
    """Whether elements share memory. Then the original keeps little, and how its results lie depends on the input."""
    return any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))


def is_dense(x: torch.Tensor) -> bool:
    """Whether the elements, which share no memory, fill one block of it."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return last + 1 == x.numel() or x.numel() == 0


def same_order(x: torch.Tensor, stride: Sequence[int]) -> bool:
    """Whether ``x`` lies in memory as a dense tensor of these strides does."""
    return all(size == 1 or one == two for size, one, two in zip(x.shape, x.stride(), stride, strict=True))


def in_order(x: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """``x`` in one dimension, in the order of dense ``stride``; a copy only where it lies otherwise."""
    if not same_order(x, stride):
        x = x.new_empty_strided(x.shape, stride).copy_(x)
    return x.as_strided((x.numel(),), (1,))


def pieces(numel: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Where to cut: on CPU into what a cache holds; elsewhere every launch costs, so not at all."""
    size = _PIECE if device.type == "cpu" else max(numel, 8)
    for start in range(0, numel, size):
        yield start, min(start + size, numel)


def packed(flat: torch.Tensor, numbers: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
    """One bit per element, whether it (or ``numbers`` of it) is not zero: ceil(n / 8) bytes. NaN is not zero.

    (On CPU ``to(torch.bool)`` takes a fifth of the time of a comparison.)
    """
    code = torch.empty(code_bytes(flat.numel()), dtype=torch.uint8, device=flat.device)
    for start, end in pieces(flat.numel(), flat.device):
        part = flat[start:end] if numbers is None else numbers(flat[start:end])
        code[start // 8 : code_bytes(end)] = _ops._pack_bits(part.to(torch.bool))
    return code


def unpacked(code: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """The bits from ``start``, a multiple of 8, to ``end``, as bools."""
    return _ops._unpack_bits(code[start // 8 : code_bytes(end)], [end - start], [1])


def numbers(code: torch.Tensor, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    """The same as ones and zeros. (On CPU bytes become floats six times as fast as bools do.)"""
    return unpacked(code, start, end).view(torch.uint8).to(dtype)


def code_bytes(numel: int) -> int:
    return (numel + 7) // 8


class _Tie(torch.autograd.Function):
    """Nothing, but connected: an empty tensor whose gradient is zeros for ``x``."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.like = {"size": inputs[0].shape, "dtype": inputs[0].dtype, "device": inputs[0].device}

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return None if gradient is None else torch.zeros(**ctx.like)


def tie(x: torch.Tensor) -> torch.Tensor | None:
    """What connects a gradient made from a mask to ``x`` without keeping ``x``.

    The original keeps a tensor of the graph, so its second derivative is zeros there, not missing. Compiled code has
    no double backward and needs no tie.
    """
    return None if is_traced() else _Tie.apply(x)


def untied(tie: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient of a tie: the zeros behind it."""
    return None if tie is None else torch.zeros_like(tie)
