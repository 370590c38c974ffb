"""Count the bytes of fake storages as they come and go: the memory of code that never really runs."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradstow.capture._tree import dense_parts, storage_key


class FakeMemory(TorchDispatchMode):
    """While entered, follows every storage that an op makes; ``peak_bytes`` is the highest live sum."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for item in tree_leaves((args, kwargs)):
            for part in dense_parts(item):
                self._known.add(storage_key(part))
        result = func(*args, **(kwargs or {}))
        for item in tree_leaves(result):
            for part in dense_parts(item):
                if part.device.type == self.device:
                    self._follow(part.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.live_bytes += storage.nbytes()
        weakref.finalize(storage, self._gone, key, storage.nbytes())

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live_bytes -= nbytes
