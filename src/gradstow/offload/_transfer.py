"""What a place must be able to do, and what is on its way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch


class Transfer(ABC):
    """A tensor on its way to a place or back."""

    @abstractmethod
    def wait(self) -> None:
        """Hold back the ops of this thread that come next until the tensor's memory may be given up, or be read.

        Raises:
            OffloadError: it will not get there.
        """

    @abstractmethod
    def wait_whole(self) -> None:
        """Wait until nothing of it is left to do, for measurements."""


class Place(ABC):
    """Somewhere that dense tensors can go, each as often back as is wanted."""

    @abstractmethod
    def leave(self, x: torch.Tensor) -> Any:
        """Start to take the tensor in. Returns a Transfer, which stands for what is kept."""

    @abstractmethod
    def back(self, left: Any, x: torch.Tensor) -> Transfer:
        """Start to copy into ``x`` what ``leave`` took in and ``wait`` saw there."""

    @abstractmethod
    def drop(self, left: Any) -> None:
        """Forget what ``leave`` took in, as soon as it is there. May be called in any thread, at any moment."""

    @abstractmethod
    def forked(self, left: Any) -> None:
        """This is a child of the process that sent it: say so where it cannot get there any more."""


def flat(x: torch.Tensor) -> torch.Tensor:
    """The numbers of a dense tensor in the order of memory."""
    return x.detach().as_strided((x.numel(),), (1,))


def as_bytes(x: torch.Tensor) -> np.ndarray:
    """The memory of a dense tensor on the CPU."""
    numbers = flat(x)
    return numbers.numpy() if x.dtype == torch.uint8 else numbers.view(torch.uint8).numpy()
