"""The loss of a step: where it is, whether it is one, and room for one that nobody knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gradstow._errors import CaptureError
from gradstow.capture._tree import tensors


def find_loss(output: Any) -> torch.Tensor | None:
    """The loss inside a model's output: the output itself if it is one number, else its ``.loss``."""
    candidates = [output, getattr(output, "loss", None)]
    if isinstance(output, Mapping):
        candidates.append(output.get("loss"))
    for item in candidates:
        if isinstance(item, torch.Tensor) and item.numel() == 1 and item.requires_grad:
            return item
    return None


def check_loss(loss: Any) -> None:
    """Refuse what cannot be a loss.

    Raises:
        CaptureError: not a tensor, not one number, or without a gradient.
    """
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(f"the loss is a {type(loss).__name__}, not a tensor. Return a tensor with one number.")
    if loss.numel() != 1:
        raise CaptureError(f"the loss has shape {tuple(loss.shape)}, not one number. Reduce it, for example .mean().")
    if not loss.requires_grad:
        raise CaptureError(
            "the loss does not depend on any trainable parameter of the model (it has no gradient). "
            "Check that it uses the model's output and that nothing is detached."
        )


# What a loss and its backward take beside the output, in outputs of float32 (measured): mse_loss 2, cross_entropy 3,
# l1_loss and output.square().mean() 4, (output - target).square().mean() and kl_div of softmaxes 5 and more.
_LOSS = 6


def loss_reserve(output: Any) -> int:
    """Room for a loss that is not known, in bytes; 0 where an output is the loss.

    Six times what the outputs that it can depend on take as float32: losses of shorter types are computed so.
    """
    if find_loss(output) is not None:
        return 0
    return _LOSS * sum(t.untyped_storage().nbytes() * max(1, 4 // t.element_size()) for t in differentiable(output))


def differentiable(output: Any) -> list[torch.Tensor]:
    return [t for t in tensors(output) if t.requires_grad]
