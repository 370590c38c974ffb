"""The random streams of Python, NumPy and torch: taken, put back, stored."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Randomness:
    """The state of every stream; ``cuda`` by device index. Taking it waits for no device."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    cpu: torch.Tensor
    cuda: dict[int, torch.Tensor]

    @staticmethod
    def now(devices: tuple[int, ...] = ()) -> Randomness:
        numpy: Any = np.random.get_state()
        cuda = {index: torch.cuda.get_rng_state(index) for index in devices}
        return Randomness(random.getstate(), numpy, torch.get_rng_state(), cuda)

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        for index, state in self.cuda.items():
            torch.cuda.set_rng_state(state, index)

    def state_dict(self) -> dict[str, Any]:
        """As numbers, text and tensors, which ``torch.load(weights_only=True)`` reads."""
        name, keys, *rest = self.numpy
        return {
            "python": self.python,
            "numpy": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
            "cpu": self.cpu,
            "cuda": self.cuda,
        }

    @staticmethod
    def of(state: Mapping[str, Any]) -> Randomness:
        version, words, gauss = state["python"]
        name, keys, *rest = state["numpy"]
        numpy = (name, keys.cpu().numpy().astype(np.uint32), *rest)
        cuda = {int(index): stream.cpu() for index, stream in state["cuda"].items()}
        return Randomness((version, tuple(words), gauss), numpy, state["cpu"].cpu(), cuda)


def cuda_devices(model: torch.nn.Module) -> tuple[int, ...]:
    """The CUDA devices that the model lies on."""
    found = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    return tuple(sorted(index for index in found if index is not None))
