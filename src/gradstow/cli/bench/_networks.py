"""The small networks that the tables train."""

from __future__ import annotations

from typing import Any

from torch import nn


def residual(channels: int, classes: int) -> nn.Module:
    """Like ResNet-18 with a quarter of its depth and width: BatchNorm, four residual blocks."""

    class Block(nn.Module):
        def __init__(self, before: int, after: int, stride: int) -> None:
            super().__init__()
            self.first = nn.Sequential(
                nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()
            )
            self.second = nn.Sequential(nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after))
            same = before == after and stride == 1
            self.short = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)

        def forward(self, x: Any) -> Any:
            return nn.functional.relu(self.second(self.first(x)) + self.short(x))

    stem = [nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    blocks = [Block(16, 16, 2), Block(16, 32, 2), Block(32, 64, 2), Block(64, 64, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def small_cnn(channels: int, classes: int, width: int = 16) -> nn.Module:
    """Like VGG with six convolutions: BatchNorm, ReLU, max-pooling, dropout, so that each strategy finds something."""

    def block(before: int, after: int) -> list[nn.Module]:
        ends = ((before, after), (after, after))
        convs = [(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()) for a, b in ends]
        return [*(module for conv in convs for module in conv), nn.MaxPool2d(2)]

    layers = [*block(channels, width), *block(width, 2 * width), *block(2 * width, 4 * width)]
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16 * width, classes)]
    return nn.Sequential(*layers, *head)
