"""Memory that grows step by step: cheap readings, and a look at the tensors only where these keep rising."""

from __future__ import annotations

import contextlib
import gc
import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from gradstow.capture import storage_key
from gradstow.train._holders import name_holder

_FIRST, _MOST = 4, 256  # steps between readings
_RISES = 4  # readings in a row that are higher than the one before
_BYTES = {"cpu": 1 << 20, "cuda": 4096}  # a rise: the allocator of the C library takes and gives pages as it likes


@dataclass(frozen=True, slots=True)
class Grown:
    """Tensors that were not there ``steps`` ago. Bytes ``per_step``; ``count`` of them; the commonest ``shape``."""

    per_step: int
    count: int
    steps: int
    shape: tuple[int, ...]
    holder: str


class Growth:
    """Reads the memory every few steps: on CUDA the allocated bytes, on CPU the resident set.

    Intervals double while nothing rises. After four rises in a row the live tensors are counted, and again one interval
    later: only where these have grown it is reported.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._device = device if device.type == "cuda" else torch.device("cpu")
        self._rise = _BYTES[self._device.type]
        self._interval, self._next = _FIRST, _FIRST
        self._last, self._rises = 0, 0
        self._before: tuple[int, dict[int, int]] | None = None  # the step, and the bytes of the storages alive then
        self._over = False

    def look(self, step: int) -> Grown | None:
        """At the start of a step, when the last one's tensors are gone. Reports once."""
        if step < self._next or self._over:
            return None
        level = _allocated(self._device)
        rose = bool(self._last) and level >= self._last + self._rise
        self._last, self._rises = level, self._rises + 1 if rose else 0
        found = None
        if self._before is not None:
            found = self._compare(step, *self._before)
            self._before, self._rises = None, 0
            self._over = found is not None
        elif self._rises >= _RISES:
            self._before = step, {key: _nbytes(t) for key, t in _storages(self._device.type).items()}
        if not rose and self._before is None:
            self._interval = min(_MOST, 2 * self._interval)
        self._next = step + self._interval
        return found

    def _compare(self, step: int, then: int, before: dict[int, int]) -> Grown | None:
        now = _storages(self._device.type)
        new = {key: tensor for key, tensor in now.items() if key not in before}
        nbytes = sum(map(_nbytes, now.values())) - sum(before.values())
        count, steps = len(now) - len(before), step - then
        if count < steps // 2 or nbytes < self._rise // 4:
            return None
        shape = Counter(tuple(t.shape) for t in new.values()).most_common(1)[0][0]
        some = next(t for t in new.values() if tuple(t.shape) == shape)
        del new, now
        return Grown(nbytes // steps, count, steps, shape, name_holder(some))


def _storages(device: str) -> dict[int, torch.Tensor]:
    """Storage → a tensor on it, of all live ones."""
    found: dict[int, torch.Tensor] = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # sparse ones, and wrappers without memory
                storage = item.untyped_storage()
                if storage.device.type == device and storage.nbytes():  # a fake one's is on meta
                    found.setdefault(storage_key(item), item)
    return found


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _allocated(device: torch.device) -> int:
    """Bytes that the process has, or 0 where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _page()
    except (OSError, IndexError, ValueError):
        return 0


def _page() -> int:
    size: Any = os.sysconf("SC_PAGE_SIZE")
    return int(size)
