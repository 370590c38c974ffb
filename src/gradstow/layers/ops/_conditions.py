"""When a node of our own can run, and in which types."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

_jit: Any = torch.jit


def lean_runs(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether a node of our own can run for these: something needs a gradient, and a plain one (no forward-mode
    derivative, no torch.func transform, which need rules of their own; no complex, sparse or nested tensors)."""
    if not isinstance(x, torch.Tensor) or not torch.is_grad_enabled():
        return False
    if not x.is_floating_point() or x.layout != torch.strided or _jit.is_tracing():
        return False
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        return False
    return x.requires_grad or any(t is not None and t.requires_grad for t in others)


def compute_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The type in which autocast runs products on ``x``, or None where it leaves them alone."""
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return None if x.dtype == torch.float64 else torch.get_autocast_dtype(kind)


def cast(t: torch.Tensor | None, dtype: torch.dtype | None) -> Any:
    """As autocast casts: float64 is left as it is. A weight is cast anew each time, so that no copy of it is kept."""
    return t if t is None or dtype is None or t.dtype == torch.float64 else t.to(dtype)


def without_autocast(x: torch.Tensor) -> Any:
    """For a backward: what it runs again must run in the forward's types, wherever ``backward()`` was called."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()
