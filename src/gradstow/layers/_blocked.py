"""A linear layer whose large products are cut into blocks that run side by side."""

from __future__ import annotations

import torch
from torch import nn

from gradstow.layers.ops._blocked import BLOCK, blocked_linear


class BlockedLinear(nn.Linear):
    """``nn.Linear`` over ``blocked_linear``: three products, each cut into blocks of ``block`` × ``block`` results.

    For 4096 rows, inputs and outputs these are 16 blocks of 1024 × 1024 each. Kept for the backward: the input only.
    """

    block: int = BLOCK
    """Rows and columns of a block."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in_features) to (..., out_features)."""
        return blocked_linear(input, self.weight, self.bias, block=self.block)
