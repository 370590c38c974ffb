"""ReLU's output as its non-zeros and a bit for each number."""

from __future__ import annotations

from typing import final

import torch
from torch import fx

from gradstow.actions._offer import Decode, Offers, Replacement
from gradstow.offload import decode_sparse, encode_sparse, sparse_nbytes, spill_sparse

SPARSE_OPS = ("aten.relu.default",)  # about half of whose output is zero


@final
class Sparse(Replacement):
    """Exact; about 0.6 of the bytes. Pays where the output would otherwise be made again from a convolution."""

    def emit(self, offers: Offers, node: fx.Node) -> None:
        value: torch.Tensor = node.meta["val"]
        size = sparse_nbytes(value.numel(), value.element_size())
        code = offers.call(node, encode_sparse, (node,), value.new_empty((size,), dtype=torch.uint8))
        ticket = torch.empty(1, dtype=torch.int64, device="cpu")
        left = offers.call(code, spill_sparse, (node, code), ticket)
        layout = (list(value.shape), list(value.stride()), value.dtype)
        offers.decodes[offers.op_of(node)] = Decode(self.code, decode_sparse, (code, left, *layout))

    def fits(self, value: torch.Tensor) -> bool:
        return value.is_floating_point() and value.element_size() > 1
