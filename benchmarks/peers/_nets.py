"""Models of our own: a U-Net, a language model of LSTMs, and tiny ones for tests and smoke runs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Made = tuple[nn.Module, Any, Any]


class Double(nn.Sequential):
    """Two convolutions, each with BatchNorm and ReLU."""

    def __init__(self, given: int, width: int) -> None:
        layers: list[nn.Module] = []
        for channels in (given, width):
            layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        super().__init__(*layers)


class UNet(nn.Module):
    """Down by pooling, up by transposed convolutions, features of each level handed across."""

    def __init__(self, classes: int, widths: tuple[int, ...] = (32, 64, 128, 256)) -> None:
        super().__init__()
        self.down = nn.ModuleList(Double(a, b) for a, b in zip((3, *widths), widths, strict=False))
        above = list(zip(widths[1:], widths, strict=False))[::-1]
        self.grow = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in above)
        self.up = nn.ModuleList(Double(2 * b, b) for _, b in above)
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        across = []
        for number, level in enumerate(self.down):
            x = level(F.max_pool2d(x, 2) if number else x)
            across.append(x)
        for grow, level, features in zip(self.grow, self.up, across[-2::-1], strict=True):
            x = level(torch.cat((features, grow(x)), 1))
        return self.head(x)


class Recurrent(nn.Module):
    """One LSTM, of which only the outputs go on, with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm, self.drop = nn.LSTM(width, width, batch_first=True), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.lstm(x)[0])


class LSTMLanguage(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(*(Recurrent(width) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(ids)))


class Stage(nn.Sequential):
    """One convolution with its BatchNorm and ReLU."""

    def __init__(self, given: int, width: int) -> None:
        super().__init__(
            nn.Conv2d(given, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )


class SmallCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(*(Stage(a, 16) for a in (3, 16, 16, 16)), nn.AdaptiveAvgPool2d(2))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


def unet(batch: int) -> Made:
    return UNet(10), (torch.randn(batch, 3, 128, 128), torch.randint(0, 10, (batch, 128, 128))), class_loss


def lstm(batch: int) -> Made:
    ids = torch.randint(0, 5000, (batch, 64))
    return LSTMLanguage(5000, 256, 4), (ids, ids.roll(-1, 1)), token_loss


def tiny_cnn(batch: int) -> Made:
    return SmallCNN(), (torch.randn(batch, 3, 16, 16), torch.randint(0, 10, (batch,))), class_loss


def class_loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output, batch[1])


def token_loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())
