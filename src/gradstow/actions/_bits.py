"""Bools (dropout's masks, conditions) as bits."""

from __future__ import annotations

from typing import final

import torch
from torch import fx

from gradstow._ops import pack_bits, unpack_bits
from gradstow.actions._offer import SMALLEST, Action, Offers, dense


@final
class Bits(Action):
    """Exact; an eighth of the bytes. Packing and unpacking take a fraction of drawing a mask."""

    name = "bits"

    def offer(self, offers: Offers) -> list[fx.Node]:
        return [n for n in offers.forward_calls() if _is_mask(n) and offers.readers(n) and offers.alone(n)]

    def emit(self, offers: Offers, node: fx.Node) -> None:
        value, readers = node.meta["val"], offers.readers(node)
        size, stride = list(value.shape), list(value.stride())
        packed = value.new_empty((-(-value.numel() // 8),), dtype=torch.uint8)
        code = offers.call(node, pack_bits, (node,), packed)
        again = value.new_empty_strided(size, stride)
        mask = offers.call(code, unpack_bits, (code, size, stride), again)
        for reader in readers:
            offers.replace(reader, node, mask)


def _is_mask(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.numel() >= SMALLEST and dense(value)
