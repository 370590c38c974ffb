"""Max-pooling whose backward keeps 4 or 8 bits per output, and not the input."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gradstow.layers.ops import _max_pool


class MaxPool2d(nn.MaxPool2d):
    """``nn.MaxPool2d`` that keeps, for n outputs, ceil(n / 2) bytes (windows of up to 16 elements) or n (up to 256).

    With ``return_indices=True`` and for larger windows it is torch's own.
    """

    def forward(self, input: torch.Tensor) -> Any:
        if self.return_indices:
            return super().forward(input)
        return _max_pool.max_pool2d(input, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode)


class MaxPool1d(nn.MaxPool1d):
    """``nn.MaxPool1d`` that keeps, for n outputs, ceil(n / 2) bytes (windows of up to 16 elements) or n (up to 256).

    With ``return_indices=True`` and for larger windows it is torch's own.
    """

    def forward(self, input: torch.Tensor) -> Any:
        if self.return_indices:
            return super().forward(input)
        return _max_pool.max_pool1d(input, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode)
