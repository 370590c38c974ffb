"""Which module saves what for the backward, in one forward."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradstow.layers._saved import saved_storages

_CALL = nn.Module._call_impl.__code__


@dataclass(frozen=True)
class Saves:
    """The storages that a forward keeps, each once and whole; parameters, buffers and the batch are not among them.

    Attributes:
        sizes: bytes, by storage.
        savers: the paths of the modules that keep it, the first one first.
    """

    sizes: dict[int, int]
    savers: dict[int, list[str]]

    @property
    def total(self) -> int:
        return sum(self.sizes.values())

    def by_owner(self, paths: Collection[str]) -> dict[str, int]:
        """Bytes by the innermost of these modules that the first saver is, or lies in; the others' are left out."""
        found = dict.fromkeys(paths, 0)
        for key, size in self.sizes.items():
            path = self.savers[key][0]
            while path and path not in found:
                path = path.rpartition(".")[0]
            if path in found:
                found[path] += size
        return found

    def alone(self, path: str) -> bool:
        """Whether this module keeps something, and nobody else keeps any of that."""
        mine = [keys for keys in self.savers.values() if path in keys]
        return bool(mine) and all(keys == [path] for keys in mine)

    def shared(self, path: str) -> bool:
        """Whether somebody else keeps all that this module keeps, and that is something."""
        mine = [keys for keys in self.savers.values() if path in keys]
        return bool(mine) and all(len(keys) > 1 for keys in mine)


def watch_saves(model: nn.Module, run: Callable[[], Any], batch: Iterable[torch.Tensor] = ()) -> Saves:
    """Run a forward and note what autograd keeps of it.

    Which module an op belongs to is read from the calls on the stack: a hook could change what the module does.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    savers: dict[int, list[str]] = defaultdict(list)

    def note(key: int) -> None:
        path = paths.get(_module_at_work(), "")
        if path not in savers[key]:
            savers[key].append(path)

    sizes = saved_storages(run, (*model.parameters(), *model.buffers(), *batch), note)
    return Saves(sizes, dict(savers))


def _module_at_work() -> int:
    """The id of the innermost module whose call is on the stack."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code is _CALL:
            return id(frame.f_locals["self"])
        frame = frame.f_back  # type: ignore[assignment]
    return 0
