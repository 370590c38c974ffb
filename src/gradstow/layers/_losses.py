"""The classifier's last layer together with its loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gradstow.layers.ops._cross_entropy import linear_cross_entropy


class LinearCrossEntropy(nn.Linear):
    """An ``nn.Linear`` whose ``forward(input, target)`` is the cross entropy of its output, chunk by chunk.

    Its parameters and ``state_dict`` are those of ``nn.Linear(in_features, num_classes)``. Shapes, memory and errors
    are those of :func:`linear_cross_entropy`; in evaluation it never holds all logits either. ``logits(input)`` is the
    plain linear layer.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    reduction: str = "mean"
    chunk: int | None = None
    when: str | None = None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        class_weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        reduction: str = "mean",
        chunk: int | None = None,
        when: str | None = None,
    ) -> None:
        super().__init__(in_features, num_classes, bias, device, dtype)
        if class_weight is not None:
            # registered, so that it moves with the module; not in the state_dict, which stays nn.Linear's
            self.register_buffer("_class_weight", class_weight.to(device), persistent=False)
        self.ignore_index, self.label_smoothing, self.z_loss = ignore_index, label_smoothing, z_loss
        self.reduction, self.chunk, self.when = reduction, chunk, when

    def forward(  # type: ignore[override]
        self, input: torch.Tensor, target: torch.Tensor, token_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        return linear_cross_entropy(
            input,
            self.weight,
            target,
            self.bias,
            class_weight=self.class_weight,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            token_weights=token_weights,
            reduction=self.reduction,
            chunk=self.chunk,
            when=self.when,
        )

    @property
    def class_weight(self) -> torch.Tensor | None:
        return self._buffers.get("_class_weight")

    def logits(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input)
