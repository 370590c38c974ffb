"""ReLU's gradient from one bit per element."""

from __future__ import annotations

from typing import final

import torch
from torch import fx

from gradstow._ops import above_bits, zero_by_bits
from gradstow.actions._offer import SMALLEST, Action, Offers, dense

aten = torch.ops.aten


@final
class ReluBits(Action):
    """Exact; a 32nd of a float32 output's bytes, where no other backward op needs the output."""

    name = "relu bits"

    def offer(self, offers: Offers) -> list[fx.Node]:
        found = offers.backward_calls(aten.threshold_backward.default)
        return [n for n in found if has_bits(n) and _reads_alone(offers, n)]

    def emit(self, offers: Offers, node: fx.Node) -> None:
        gradient, result, limit = node.args
        value = result.meta["val"]
        packed = value.new_empty((-(-value.numel() // 8),), dtype=torch.uint8)
        code = offers.call(result, above_bits, (result, float(limit)), packed)
        offers.remember(node)
        node.target, node.args = zero_by_bits, (gradient, code)


def _reads_alone(offers: Offers, node: fx.Node) -> bool:
    result = node.args[1]
    assert isinstance(result, fx.Node), "it has bits"
    return result not in offers.backward and offers.readers(result) == [node] and offers.alone(result)


def has_bits(node: fx.Node) -> bool:
    """Whether this gradient of a ReLU can be made from bits."""
    gradient, result, _ = node.args
    if not isinstance(result, fx.Node) or not isinstance(gradient, fx.Node) or result.op != "call_function":
        return False
    value, other = result.meta["val"], gradient.meta["val"]
    large = value.numel() * value.element_size() >= SMALLEST
    alike = value.stride() == other.stride() and value.shape == other.shape
    return bool(large and alike and dense(value) and dense(other))
