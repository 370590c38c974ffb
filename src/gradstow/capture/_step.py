"""The user's training step, as far as gradstow is told of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Step:
    """What the user's training step does, as far as gradstow is told.

    Attributes:
        call: how the model is called: ``call(model)`` runs its forward and returns the output.
        inputs: what ``call`` feeds to the model; tensors in it are replaced by fakes.
        batch: what the loss gets as its second argument.
        loss: ``loss(output, batch)``; None means that the output is the loss or has a ``.loss``.
        optimizer: adds the optimizer's state and its step's working memory.
        outputs_held: whether the loop still holds the model's output while the backward runs.
    """

    call: Callable[[Any, Any], Any]
    inputs: Any
    batch: Any = None
    loss: Loss | None = None
    optimizer: torch.optim.Optimizer | None = None
    outputs_held: bool = True
