"""Max-pooling's gradient without the pooled tensor."""

from __future__ import annotations

from typing import final

import torch
from torch import fx

from gradstow._ops import max_pool_backward
from gradstow.actions._offer import Action, Offers

aten = torch.ops.aten


@final
class PoolSizes(Action):
    """Exact; the pooled tensor need not be there: of it only the sizes are read."""

    name = "pool sizes"

    def offer(self, offers: Offers) -> list[fx.Node]:
        found = offers.backward_calls(aten.max_pool2d_with_indices_backward.default)
        # the layout of the gradient follows the tensor's, and on CUDA it would be copied
        return [n for n in found if n.args[1].meta["val"].is_contiguous() and n.meta["val"].device.type == "cpu"]

    def emit(self, offers: Offers, node: fx.Node) -> None:
        offers.remember(node)
        gradient, pooled, kernel, stride, padding, dilation, ceil_mode, indices = node.args
        size = list(pooled.meta["val"].shape)
        node.target = max_pool_backward
        node.args = (gradient, indices, size, kernel, stride, padding, dilation, ceil_mode)
