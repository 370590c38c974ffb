"""Values that wait for the backward somewhere else."""

from __future__ import annotations

from typing import final

import torch
from torch import fx

from gradstow.actions._offer import LAYOUTS, Decode, Offers, Replacement
from gradstow.offload import fetch, send, sent


@final
class Offload(Replacement):
    """Exact; no bytes on the device but a ticket's eight. ``code`` is the place.

    A name ``"op>later"`` among the chosen says that the value has until after the op ``later`` to get there: until then
    its memory is held. Without that it is waited for at once.
    """

    def emit(self, offers: Offers, node: fx.Node) -> None:
        value: torch.Tensor = node.meta["val"]
        ticket = value.new_empty((1,), dtype=torch.int64, device="cpu")
        leaving = offers.call(node, send, (node, self.code), ticket)
        until = self._until(offers, node) or leaving
        gone = offers.call(until, sent, (node, leaving), torch.empty_like(ticket))
        gone.meta = {**leaving.meta, **{key: gone.meta[key] for key in ("val", LAYOUTS)}}
        layout = (list(value.shape), list(value.stride()), value.dtype, value.device)
        kind = self.code.partition(":")[0]
        offers.decodes[offers.op_of(node)] = Decode(kind, fetch, (gone, self.code, *layout))

    def fits(self, value: torch.Tensor) -> bool:
        return value.layout is torch.strided

    def _until(self, offers: Offers, node: fx.Node) -> fx.Node | None:
        later = self.until.get(offers.op_of(node).name)
        return next((n for n in offers.graph.nodes if n.name == later), None) if later else None
