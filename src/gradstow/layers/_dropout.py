"""Dropout whose backward keeps one bit per element.

``Dropout1d``, ``2d``, ``3d`` and ``FeatureAlphaDropout`` keep one number per channel in torch, which is little, and
``AlphaDropout`` has another noise: they are left to torch.
"""

from __future__ import annotations

import torch
from torch import nn

from gradstow.layers.ops import _dropout


class Dropout(nn.Dropout):
    """``nn.Dropout`` that keeps ceil(n / 8) bytes for n elements, with torch's own random numbers.

    Torch keeps the noise: 4 n bytes in float32 on CPU, n bytes on CUDA (4 n there in place).
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _dropout.dropout(input, self.p, self.training, self.inplace)
