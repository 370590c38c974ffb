"""Batches for transformers, by task: what the model is called with, labels included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zoo._subject import BATCH, CLASSES, classes, images

TOKENS, WORDS, IMAGE = 32, 160, 64

Batch = Callable[[Any], dict[str, Any]]


def words(length: int = TOKENS) -> torch.Tensor:
    return torch.randint(5, WORDS, (BATCH, length))


def same(length: int = TOKENS) -> Batch:
    """Language models: the labels are the ids."""

    def batch(_config: Any) -> dict[str, Any]:
        ids = words(length)
        return {"input_ids": ids, "labels": ids.clone()}

    return batch


def sequences(_config: Any) -> dict[str, Any]:
    """Encoder and decoder: other labels than ids."""
    return {"input_ids": words(), "labels": words(16)}


def sentence(_config: Any) -> dict[str, Any]:
    return {"input_ids": words(), "labels": classes()}


def pixels(size: int = IMAGE) -> Batch:
    return lambda _config: {"pixel_values": images(size), "labels": classes()}


def segments(_config: Any) -> dict[str, Any]:
    return {"pixel_values": images(IMAGE), "labels": torch.randint(0, CLASSES, (BATCH, IMAGE, IMAGE))}


def pixels_alone(_config: Any) -> dict[str, Any]:
    return {"pixel_values": images(IMAGE)}


def frames(_config: Any) -> dict[str, Any]:
    return {"pixel_values": torch.randn(BATCH, 4, 3, IMAGE, IMAGE), "labels": classes()}


def boxes(_config: Any) -> dict[str, Any]:
    labels = []
    for count in (3, 2, 1, 4):
        corner = torch.rand(count, 2) * 0.4 + 0.3
        labels.append(
            {"class_labels": torch.randint(0, CLASSES, (count,)), "boxes": torch.cat([corner, corner * 0.4], 1)}
        )
    return {"pixel_values": images(IMAGE), "labels": labels}


def masks(_config: Any) -> dict[str, Any]:
    masks = [(torch.rand(count, IMAGE, IMAGE) > 0.5).float() for count in (3, 2, 1, 4)]
    return {
        "pixel_values": images(IMAGE),
        "mask_labels": masks,
        "class_labels": [torch.randint(0, CLASSES, (len(m),)) for m in masks],
    }


def wave(_config: Any) -> dict[str, Any]:
    return {"input_values": torch.randn(BATCH, 2400), "labels": torch.randint(5, 30, (BATCH, 8))}


def mel(bins: int = 80, frames: int = 100) -> Batch:
    return lambda _config: {"input_features": torch.randn(BATCH, bins, frames), "labels": words(16)}


def pairs(_config: Any) -> dict[str, Any]:
    """Image and text, with the contrastive loss."""
    return {"input_ids": words(16), "pixel_values": images(IMAGE), "return_loss": True}


def series(_config: Any) -> dict[str, Any]:
    past, future = 28, 8
    return {
        "past_values": torch.randn(BATCH, past).abs(),
        "past_time_features": torch.randn(BATCH, past, 2),
        "past_observed_mask": torch.ones(BATCH, past),
        "future_values": torch.randn(BATCH, future).abs(),
        "future_time_features": torch.randn(BATCH, future, 2),
    }


def channels(_config: Any) -> dict[str, Any]:
    return {"past_values": torch.randn(BATCH, 32, 3), "future_values": torch.randn(BATCH, 8, 3)}


def answers(_config: Any) -> dict[str, Any]:
    return {"input_ids": words(16), "pixel_values": images(IMAGE), "labels": torch.rand(BATCH, CLASSES)}


def captions(_config: Any) -> dict[str, Any]:
    return {"input_ids": words(16), "pixel_values": images(IMAGE), "labels": words(16)}


def pages(_config: Any) -> dict[str, Any]:
    corner = torch.randint(0, 50, (BATCH, TOKENS, 2))
    return {"input_ids": words(), "bbox": torch.cat([corner, corner + 9], 2), "labels": words() % CLASSES}
