"""Indices in the narrowest integers that hold them."""

from __future__ import annotations

import operator
from typing import final

import torch
from torch import fx

from gradstow.actions._offer import SMALLEST, Action, Offers

aten = torch.ops.aten

_SORTED = {aten.topk.default: 1, aten.sort.default: 1, aten.sort.stable: 1, aten.kthvalue.default: 1}
_WINDOWS = {aten.max_pool2d_with_indices.default: 2, aten.max_pool3d_with_indices.default: 3}
_WINDOWS |= {aten.adaptive_max_pool2d.default: 2, aten.adaptive_max_pool3d.default: 3}
_ALONG = {aten.max.dim: 1, aten.min.dim: 1, aten.median.dim: 1, aten.mode.default: 1, aten.cummax.default: 1}


@final
class Narrow(Action):
    """Exact; a quarter or half of the bytes of 64-bit indices whose range follows from shapes."""

    name = "narrow"

    def offer(self, offers: Offers) -> list[fx.Node]:
        calls = [n for n in offers.forward_calls() if n.target is operator.getitem and n.args[1] == 1]
        return [n for n in calls if _bound(n) is not None and offers.readers(n) and offers.alone(n)]

    def emit(self, offers: Offers, node: fx.Node) -> None:
        value, readers, bound = node.meta["val"], offers.readers(node), _bound(node)
        assert bound is not None, "it was offered"
        narrow = torch.uint8 if bound <= 1 << 8 else torch.int16 if bound <= 1 << 15 else torch.int32
        code = offers.call(node, aten._to_copy.default, (node,), torch.empty_like(value, dtype=narrow))
        code.kwargs = {"dtype": narrow}
        wide = offers.call(code, aten._to_copy.default, (code,), torch.empty_like(value))
        wide.kwargs = {"dtype": torch.int64}
        for reader in readers:
            offers.replace(reader, node, wide)


def _bound(node: fx.Node) -> int | None:
    """All indices are below this; None where that is not known, or not below 2³¹."""
    value, source = node.meta.get("val"), node.args[0]
    if not isinstance(value, torch.Tensor) or value.dtype != torch.int64 or not isinstance(source, fx.Node):
        return None
    shape = source.args[0].meta["val"].shape if source.args and isinstance(source.args[0], fx.Node) else ()
    if value.numel() * value.element_size() < SMALLEST or not shape:
        return None
    if source.target in _WINDOWS:
        bound = 1
        for size in shape[-_WINDOWS[source.target] :]:
            bound *= int(size)
    elif source.target in _SORTED or source.target in _ALONG:
        bound = max(int(size) for size in shape)
    else:
        return None
    return bound if bound < 1 << 31 else None
