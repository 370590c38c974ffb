"""Convolutions that keep their input only where the weight trains, and do their activation in the same node."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gradstow.layers.ops._conv import convolution
from gradstow.layers.ops._epilogue import Activation, activation_of, way_of


class _Convolution(nn.Module):
    """What ``Conv1d``, ``Conv2d`` and ``Conv3d`` share; a base beside torch's own class."""

    activation: str | Activation | None = None
    saves: str = "output"

    def __init__(
        self, *args: Any, activation: str | Activation | None = None, saves: str = "output", **options: Any
    ) -> None:
        super().__init__(*args, **options)
        way_of(activation_of(activation), saves)
        self.activation, self.saves = activation, saves

    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        x, padding = padded(self, input)
        conv: Any = self
        geometry = (conv.stride, padding, conv.dilation, conv.groups)
        return convolution(x, weight, bias, *geometry, self.activation, self.saves)

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", activation={self.activation}" if self.activation is not None else "")


def padded(conv: Any, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """The input after a padding that is not zeros (torch keeps that one, too), and the padding left to do."""
    if conv.padding_mode == "zeros":
        return x, conv.padding
    return F.pad(x, conv._reversed_padding_repeated_twice, mode=conv.padding_mode), 0


class Conv1d(_Convolution, nn.Conv1d):
    """``torch.nn.Conv1d`` with the gradients that are needed, and an ``activation`` in the same node. See ``Conv2d``.

    Shapes: input (N, C, L) or (C, L).
    """


class Conv2d(_Convolution, nn.Conv2d):
    """``torch.nn.Conv2d`` with the gradients that are needed, and an ``activation`` in the same node.

    Shapes: input (N, C, H, W) or (C, H, W). Parameters and ``state_dict`` are those of ``torch.nn.Conv2d``; every
    padding mode, groups, dilation and "same" are supported.

    Kept for the backward: the input where the weight needs a gradient (torch keeps it always), the weight by
    reference (torch keeps a short copy under autocast), and of the activation its output (which the next layer keeps
    anyway) or with ``saves="mask"`` one bit per element; never the pre-activation. gelu, silu, mish, hardswish and elu
    keep only the input and run the convolution once more.

    Numbers: bit-equal to ``torch.nn.Conv2d`` followed by the activation, forward and gradients. Used several
    times under one autocast, it gives what torch gives with ``torch.autocast(..., cache_enabled=False)``: torch's cache
    adds the gradients of all uses up in the short type, on the one copy of the weight that it keeps.

    Args:
        activation: "relu", "relu6", "hardtanh", "leaky_relu", "sigmoid", "tanh", "gelu", "gelu_tanh", "silu", "mish",
            "hardswish", "elu", an ``Activation`` with numbers of its own, or None. Can be set later.
        saves: "output" or "mask". Can be set later.

    Raises:
        PolicyError: for a name that does not exist, or a mask for an activation whose gradient needs more.
    """


class Conv3d(_Convolution, nn.Conv3d):
    """``torch.nn.Conv3d`` with the gradients that are needed, and an ``activation`` in the same node. See ``Conv2d``.

    Shapes: input (N, C, D, H, W) or (C, D, H, W).
    """
