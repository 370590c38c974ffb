"""Normalisation layers whose statistics and sums are float32 whatever the input's type."""

from __future__ import annotations

import torch
from torch import nn

from gradstow.layers.ops._group_norm import group_norm
from gradstow.layers.ops._layer_norm import layer_norm
from gradstow.layers.ops._rms_norm import rms_norm


class LayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` over :func:`layer_norm`, which states memory and errors."""

    saves: str = "input"
    """What the backward starts from: "input", or "output" where the next layer keeps that anyway."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, self.saves)


class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` over :func:`rms_norm`, which states memory and errors."""

    saves: str = "input"
    """What the backward starts from: "input", or "output" where the next layer keeps that anyway."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.normalized_shape, self.weight, self.eps, self.saves)


class GroupNorm(nn.GroupNorm):
    """``nn.GroupNorm`` over :func:`group_norm`, which states memory and errors."""

    saves: str = "input"
    """What the backward starts from: "input", or "output" where the next layer keeps that anyway."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps, self.saves)
