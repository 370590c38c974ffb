"""A linear layer that does its activation in the same node."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gradstow.layers.ops._epilogue import Activation, activation_of, way_of
from gradstow.layers.ops._linear import linear


class Linear(nn.Linear):
    """``torch.nn.Linear`` and, where ``activation`` is set, that activation: one node, one tensor kept.

    Shapes: input (..., in), output (..., out). Parameters and ``state_dict`` are those of ``torch.nn.Linear``.

    Kept for the backward: the input where the weight needs a gradient, the weight by reference, and of the activation
    its output (which the next layer keeps anyway) or with ``saves="mask"`` a 32nd of that in float32; never the
    pre-activation. gelu, silu, mish, hardswish and elu keep only the input and run the product once more.

    Numbers: bit-equal to ``torch.nn.Linear`` followed by the activation, forward and gradients. Used several
    times under one autocast, it gives what torch gives with ``torch.autocast(..., cache_enabled=False)``: torch's cache
    adds the gradients of all uses up in the short type, on the one copy of the weight that it keeps.

    Args:
        activation: "relu", "relu6", "hardtanh", "leaky_relu", "sigmoid", "tanh", "gelu", "gelu_tanh", "silu", "mish",
            "hardswish", "elu", an ``Activation`` with numbers of its own, or None. Can be set later.
        saves: "output" or "mask". Can be set later.

    Raises:
        PolicyError: for a name that does not exist, or a mask for an activation whose gradient needs more.
    """

    activation: str | Activation | None = None
    saves: str = "output"

    def __init__(
        self, *args: Any, activation: str | Activation | None = None, saves: str = "output", **options: Any
    ) -> None:
        super().__init__(*args, **options)
        way_of(activation_of(activation), saves)
        self.activation, self.saves = activation, saves

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias, self.activation, self.saves)

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", activation={self.activation}" if self.activation is not None else "")
