"""Floats in fewer bytes, where the user asks for it."""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import fx

from gradstow._codes import CODES
from gradstow._errors import PolicyError
from gradstow._lossy import code_nbytes, decode_lossy, encode_lossy
from gradstow.actions._offer import Decode, Offers, Replacement
from gradstow.actions._relu import ReluBits, has_bits

_KINDS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@final
class Lossy(Replacement):
    """Not exact: of the chosen values the backward sees what is decoded.

    Only floats that an op of the forward makes as its first result: never parameters, inputs, indices, masks, or the
    statistics that normalisation and attention save beside their result.
    """

    def offer(self, offers: Offers) -> list[fx.Node]:
        return [n for n in super().offer(offers) if not any(_compares(r, n) for r in offers.readers(n))]

    def emit(self, offers: Offers, node: fx.Node) -> None:
        gradients = offers.backward_calls(torch.ops.aten.threshold_backward.default)
        for reader in (n for n in gradients if n.args[1] is node and has_bits(n)):
            ReluBits().emit(offers, reader)  # whether a number is above zero stays exact
        value: torch.Tensor = node.meta["val"]
        packed = value.new_empty((code_nbytes(self.code, value.numel(), value.dtype),), dtype=torch.uint8)
        data = offers.call(node, encode_lossy, (node, self.code), packed)
        layout = (list(value.shape), list(value.stride()), value.dtype)
        offers.decodes[offers.op_of(node)] = Decode(self.code, decode_lossy, (data, self.code, *layout))

    def fits(self, value: torch.Tensor) -> bool:
        # as bf16 the short types gain nothing, and float64 reaches further
        return value.dtype in _KINDS and (self.code != "bf16" or value.dtype == torch.float32)


def _compares(reader: fx.Node, value: fx.Node) -> bool:
    """Whether a compiled kernel decides by the value, as a ReLU's gradient does: such decisions stay exact."""
    compares = getattr(reader.target, "compares", None)
    return compares is not None and bool(compares(reader, value))


def code_for(lossy: object) -> str:
    """The code that ``lossy=`` asks for: by name, or the shortest one within an error, as a part of the range.

    Raises:
        PolicyError: there is none.
    """
    if isinstance(lossy, str) and lossy in CODES:
        return lossy
    if isinstance(lossy, (float, np.floating)) and 0 < lossy < 1:
        close = [name for name, code in CODES.items() if code.of_range and code.bound <= lossy]
        if close:
            return close[0]
        raise PolicyError(
            f"lossy={lossy!r} is closer than any code. The closest is int8: {CODES['int8']}. Give at least 0.004, or "
            "lossy=None to stay exact."
        )
    raise PolicyError(
        f"lossy={lossy!r} is no code. Give one of {', '.join(CODES)}, or the largest error as a part of the range of "
        "128 neighbours, between 0 and 1, such as 0.01."
    )
