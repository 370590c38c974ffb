"""Activations whose backward keeps one bit per element, or the output that the next layer keeps anyway.

Each is the torch module that it is named after: the same arguments, attributes and ``state_dict``, equal outputs and
gradients. An existing module becomes lean with ``module.__class__ = ReLU``.
"""

from __future__ import annotations

import torch
from torch import nn

from gradstow.layers.ops import _masked, _smooth


class ReLU(nn.ReLU):
    """``nn.ReLU`` that keeps ceil(n / 8) bytes for n elements.

    Attributes:
        saves: ``"mask"``, one bit per element; or ``"output"``, which is what torch keeps: free where the next layer
            keeps it too, as a convolution does.
    """

    saves: str = "mask"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _masked.relu(input, self.inplace, self.saves)


class LeakyReLU(nn.LeakyReLU):
    """``nn.LeakyReLU`` that keeps ceil(n / 8) bytes for n elements.

    Attributes:
        saves: ``"mask"``, one bit per element; or ``"output"``, free where the next layer keeps it too. A negative
            slope needs the mask.
    """

    saves: str = "mask"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _masked.leaky_relu(input, self.negative_slope, self.inplace, self.saves)


class Hardtanh(nn.Hardtanh):
    """``nn.Hardtanh`` that keeps ceil(n / 8) bytes for n elements.

    Attributes:
        saves: ``"mask"``, one bit per element; or ``"output"``, free where the next layer keeps it too.
    """

    saves: str = "mask"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _masked.hardtanh(input, self.min_val, self.max_val, self.inplace, self.saves)


class ReLU6(nn.ReLU6):
    """``nn.ReLU6`` that keeps ceil(n / 8) bytes for n elements.

    Attributes:
        saves: ``"mask"``, one bit per element; or ``"output"``, free where the next layer keeps it too.
    """

    saves: str = "mask"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _masked.hardtanh(input, 0.0, 6.0, self.inplace, self.saves)


class Hardsigmoid(nn.Hardsigmoid):
    """``nn.Hardsigmoid`` that keeps ceil(n / 8) bytes for n elements."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _masked.hardsigmoid(input, self.inplace)


class GELU(nn.GELU):
    """``nn.GELU`` as it is: in both approximations torch keeps the input and nothing else.

    For GELU written out in several ops, which keeps a tensor per op: ``from_input``.
    """


class SiLU(nn.SiLU):
    """``nn.SiLU`` as it is: torch keeps the input and nothing else. In place it keeps a copy of the input, which saves
    nothing: the gradient cannot be had from the output."""


class Mish(nn.Mish):
    """``nn.Mish`` as it is: torch keeps the input and nothing else. In place it keeps a copy of the input, which saves
    nothing: the gradient cannot be had from the output."""


class LogSigmoid(nn.LogSigmoid):
    """``nn.LogSigmoid`` that keeps its input and nothing else; torch keeps as much again on CPU."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _smooth.logsigmoid(input)


class Softsign(nn.Softsign):
    """``nn.Softsign`` that keeps its input and nothing else; torch keeps another tensor of that size."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _smooth.softsign(input)
