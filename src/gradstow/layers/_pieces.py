"""Which children of a sequence can run as one node."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules import module as torch_module

from gradstow.layers.ops import _epilogue
from gradstow.layers.ops._epilogue import Activation

_CONVS: dict[type, int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
_NORMS: dict[type, tuple[int, ...]] = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}


class Piece(NamedTuple):
    """Children of a sequence that run together: those from ``first`` to before ``end``. One alone runs plainly."""

    first: int
    end: int
    conv: Any = None
    norm: Any = None
    linear: Any = None
    act: Activation | None = None


def kind_of(module: Any) -> type | None:
    """The torch class that this module is, or None where something else happens than its forward."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(len(h) for h in hooks) or "forward" in module.__dict__ or module._compiled_call_impl is not None:
        return None
    if getattr(module, "activation", None) is not None:  # a lean layer that does one already
        return None
    for kind in type(module).__mro__:
        if not kind.__module__.startswith("gradstow.layers."):
            return kind
    return None


def watched() -> bool:
    """Whether somebody listens to the calls of all modules."""
    return bool(
        torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )


def dimensions(norm: Any) -> tuple[int, ...]:
    """The dimensions that a norm's input may have."""
    return next(allowed for kind, allowed in _NORMS.items() if isinstance(norm, kind))


def piece_at(children: list[Any], kinds: list[type | None], at: int) -> Piece:
    conv = norm = other = act = None
    end, kind = at, kinds[at]
    if kind in _CONVS:
        conv, end = children[at], end + 1
    elif kind is nn.Linear:
        other, end = children[at], end + 1
    if other is None and end < len(children) and kinds[end] in _NORMS and _joins(conv, kind, children[end], kinds[end]):
        norm, end = children[end], end + 1
    if end > at and end < len(children) and kinds[end] is not None:
        act = _epilogue.activation_of_module(children[end], kinds[end])
        end += act is not None
    return Piece(at, max(at + 1, end), conv, norm, other, act)


def _joins(conv: Any, conv_kind: type | None, norm: Any, norm_kind: type | None) -> bool:
    """Whether a norm takes what a convolution gives (or anything, without one)."""
    if conv is None:
        return True
    assert conv_kind is not None
    assert norm_kind is not None
    return norm.num_features == conv.out_channels and _CONVS[conv_kind] + 2 in _NORMS[norm_kind]
