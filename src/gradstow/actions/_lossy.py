"""Floats in fewer bytes, where the user asks for it."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import fx

from gradstow._codes import CODES
from gradstow._errors import PolicyError
from gradstow._lossy import code_nbytes, decode_lossy, encode_lossy
from gradstow.actions._offer import SMALLEST, Action, Decode, Offers, dense
from gradstow.actions._relu import ReluBits, has_bits

Codes = Mapping[str, Mapping[str, frozenset[str]]]  # region's fingerprint → code → names of ops

_WIDE = (torch.float32, torch.float64)
_KINDS = (*_WIDE, torch.float16, torch.bfloat16)


@final
class Lossy(Action):
    """Not exact: ``code`` in place of the chosen values, of which the backward sees what is decoded.

    Only floats that an op of the forward makes as its first result: never parameters, inputs, indices, masks, or the
    statistics that normalisation and attention save beside their result.

    Args:
        code: one of ``CODES``.
        chosen: names of ops in the captured graph; None for all that fit.
    """

    def __init__(self, code: str, chosen: frozenset[str] | None = None) -> None:
        self.code, self.chosen = code, chosen
        self.name = code if chosen is None else f"{code}@{','.join(sorted(chosen))}"

    @staticmethod
    def of(name: str) -> Lossy:
        code, _, chosen = name.partition("@")
        return Lossy(code, frozenset(chosen.split(",")) if chosen else None)

    def offer(self, offers: Offers) -> list[fx.Node]:
        calls = offers.forward_calls()
        return [n for n in calls if (self.chosen is None or _call(n).name in self.chosen) and self._fits(offers, n)]

    def emit(self, offers: Offers, node: fx.Node) -> None:
        gradients = offers.backward_calls(torch.ops.aten.threshold_backward.default)
        for reader in (n for n in gradients if n.args[1] is node and has_bits(n)):
            ReluBits().emit(offers, reader)  # whether a number is above zero stays exact
        value: torch.Tensor = node.meta["val"]
        packed = value.new_empty((code_nbytes(self.code, value.numel(), value.dtype),), dtype=torch.uint8)
        data = offers.call(node, encode_lossy, (node, self.code), packed)
        layout = (list(value.shape), list(value.stride()), value.dtype)
        offers.decodes[_call(node)] = Decode(self.code, decode_lossy, (data, self.code, *layout))

    def _fits(self, offers: Offers, node: fx.Node) -> bool:
        value: Any = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype not in _KINDS or not dense(value):
            return False
        if self.code == "bf16" and value.dtype != torch.float32:  # nothing to gain, or out of its range
            return False
        nbytes = value.numel() * value.element_size()
        free = offers.owns(node) and _call(node) not in offers.decodes
        return nbytes >= SMALLEST and _is_first_result(node) and free


def _call(node: fx.Node) -> fx.Node:
    """The op whose result the node holds."""
    source = node.args[0] if node.target is operator.getitem else node
    assert isinstance(source, fx.Node)
    return source


def _is_first_result(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return bool(node.args[1] == 0)
    return not isinstance(node.meta.get("val"), (tuple, list))


def code_for(lossy: object) -> str:
    """The code that ``lossy=`` asks for: by name, or the shortest one within an error, as a part of the range.

    Raises:
        PolicyError: there is none.
    """
    if isinstance(lossy, str) and lossy in CODES:
        return lossy
    if isinstance(lossy, float):
        close = [name for name, code in CODES.items() if code.of_range and code.bound <= lossy]
        if close:
            return close[0]
        raise PolicyError(
            f"lossy={lossy!r} is closer than any code. The closest is int8: {CODES['int8']}. Give at least 0.004, or "
            "lossy=None to stay exact."
        )
    raise PolicyError(
        f"lossy={lossy!r} is no code. Give one of {', '.join(CODES)}, or the largest error as a part of the range of "
        "128 neighbours, such as 0.01."
    )
