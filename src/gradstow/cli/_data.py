"""Real training sets for ``gradstow train`` and ``gradstow bench``: images, English text, image folders."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from gradstow.cli._input import InputError
from gradstow.cli._pictures import cifar10, fashion, is_cifar10, mnist

BUILT_IN = ("mnist", "text")
VOCABULARY = 256  # text is read as bytes
_HELD_OUT = 0.2


class TrainingSet(Protocol):
    """Samples by number: the first ``len(self)`` are for training, ``held_out`` others are not.

    Attributes:
        classes: of images; None for text.
    """

    name: str
    classes: int | None
    held_out: int

    def __len__(self) -> int: ...

    def batch(self, numbers: Sequence[int]) -> Any:
        """(input, target) of these samples."""


class Text:
    """The English text of Python's own help topics, as bytes; the target is the next byte."""

    name = "text"
    classes: int | None = None

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


class Folder:
    """A folder with one sub-folder of images per class, cut to squares.

    Where it has folders ``train`` and ``test`` of that kind, the images of ``test`` are held out, else every fifth.
    """

    classes: int | None

    def __init__(self, path: Path, side: int) -> None:
        try:
            from torchvision import datasets, transforms
        except ImportError as error:
            raise InputError(
                "an image folder needs torchvision, which is not installed. Run: pip install 'gradstow[vision]'"
            ) from error
        steps = transforms.Compose([transforms.Resize(side), transforms.CenterCrop(side), transforms.ToTensor()])
        halves = [path / half for half in ("train", "test")]
        parted = all(half.is_dir() for half in halves)
        try:
            parts = [datasets.ImageFolder(str(part), steps) for part in (halves if parted else [path])]
        except (OSError, ValueError) as error:
            first = str(error).splitlines()[0]
            raise InputError(
                f"{path} cannot be used as an image folder: {first} Put one sub-folder per class."
            ) from error
        if any(part.classes != parts[0].classes for part in parts):
            raise InputError(f"train and test in {path} hold other classes. Give both the same sub-folders.")
        self.name, self.classes = str(path), len(parts[0].classes)
        images = [(part, number) for part in parts for number in range(len(part))]
        first_held = len(parts[0]) if parted else len(images)
        held = [n >= first_held or (not parted and n % 5 == 4) for n in range(len(images))]
        order = sorted(range(len(images)), key=held.__getitem__)  # those for training first
        self._images = [images[n] for n in order]
        self.held_out = sum(held)

    def __len__(self) -> int:
        return len(self._images) - self.held_out

    def batch(self, numbers: Sequence[int]) -> Any:
        found = [self._images[n][0][self._images[n][1]] for n in numbers]
        return torch.stack([image for image, _ in found]), torch.tensor([label for _, label in found])


def open_set(name: str, *, channels: int, side: int, seq: int) -> TrainingSet:
    """A built-in set by its name, or a folder: CIFAR-10 as torchvision keeps it, or images by class.

    Raises:
        InputError: there is none, or what it needs is not installed.
    """
    if name == "mnist":
        return mnist(channels, side)
    if name == "fashion":
        return fashion(channels, side)
    if name == "text":
        return Text(seq)
    if Path(name).is_dir():
        return cifar10(Path(name), channels, side) if is_cifar10(Path(name)) else Folder(Path(name), side)
    raise InputError(
        f"there is no data {name!r}. Give mnist, fashion, text, the folder of CIFAR-10, or a folder with one "
        "sub-folder of images per class."
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
