"""What the zoo tries: a model, its batch and its loss, built from a name; small images, nothing downloaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

BATCH = 4
CLASSES = 10


class NotBuilt(Exception):
    """The library itself cannot build the model here, or its plain forward fails: nothing about gradstow."""


@dataclass(frozen=True)
class Subject:
    """``loss(output, batch)``, or None where the output has a ``.loss``."""

    model: torch.nn.Module
    batch: Any
    loss: Callable[[Any, Any], torch.Tensor] | None


def images(size: int, channels: int = 3, count: int = BATCH) -> torch.Tensor:
    return torch.randn(count, channels, size, size)


def classes(count: int = BATCH) -> torch.Tensor:
    return torch.randint(0, CLASSES, (count,))


def batch_for(model: torch.nn.Module) -> int:
    """More images where there are few weights: else their gradients are the peak, which no plan can lower."""
    weights = sum(p.numel() for p in model.parameters())
    return 16 if weights < 6e6 else 6 if weights < 15e6 else 2


def sum_of_losses(output: Any, batch: Any) -> torch.Tensor:
    """Cross entropy for every part of the output that is logits, the mean square of any other."""
    parts = [_loss(part, batch[1]) for part in _parts(output)]
    return torch.stack(parts).sum()


def _loss(part: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if part.dim() == target.dim() + 1 and part.shape[1] >= CLASSES:
        return F.cross_entropy(part, target)
    return part.float().square().mean()


def _parts(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if output is None or isinstance(output, (str, int, float)):
        return []
    items = output.values() if isinstance(output, Mapping) else output
    return [part for item in items for part in _parts(item)]
