"""A convolution and the batch norm behind it as one convolution, while the statistics stand still."""

from __future__ import annotations

import torch


def folded(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    variance: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias of the convolution that does both, in the types of ``weight``; differentiable in all.

    ``weight * s`` and ``(bias - mean) * s + norm_bias`` with ``s = norm_weight / sqrt(variance + eps)``, computed in
    float32 at least. Memory: one weight. Nothing is cached: it can never be older than what it is made of.
    """
    wide = torch.promote_types(torch.promote_types(weight.dtype, variance.dtype), torch.float32)
    scale = (variance.to(wide) + eps).rsqrt()
    if norm_weight is not None:
        scale = scale * norm_weight.to(wide)
    shift = -mean.to(wide) if bias is None else bias.to(wide) - mean.to(wide)
    shift = shift * scale if norm_bias is None else torch.addcmul(norm_bias.to(wide), shift, scale)
    spread = scale.view(-1, *(1 for _ in weight.shape[1:]))
    return (weight.to(wide) * spread).to(weight.dtype), shift.to(weight.dtype)


def pays(x: torch.Tensor, weight: torch.Tensor, stride: tuple[int, ...]) -> bool:
    """Whether the pass over the weight that folding takes is shorter than the pass over the output that it saves."""
    positions = x.numel() // max(1, x.size(1))
    for step in stride:
        positions //= step
    return weight.numel() <= positions * weight.size(0)
