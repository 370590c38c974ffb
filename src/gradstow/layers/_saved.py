"""What a forward saves for its backward, counted exactly: through ``torch.autograd.graph.saved_tensors_hooks``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


def saved_storages(
    run: Callable[[], Any], known: Iterable[torch.Tensor] = (), note: Callable[[int], None] = lambda _key: None
) -> dict[int, int]:
    """Bytes of every storage that autograd saves while ``run()`` runs, by a key of the storage.

    Each storage counts once, however many views of it are saved, and whole. Those of ``known`` (the parameters, the
    input) are left out. Everything saved is held until the end, so that no key is used twice. ``note`` is called with
    the key each time that something on a storage is saved.
    """
    left_out = {tensor.untyped_storage()._cdata for tensor in known}
    held: list[torch.Tensor] = []
    sizes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided:
            return tensor
        tensor = tensor.detach()  # a tensor that knows its node, held by that node, would never be given up
        storage = tensor.untyped_storage()
        if storage._cdata not in left_out and storage.nbytes():
            held.append(tensor)
            sizes[storage._cdata] = storage.nbytes()
            note(storage._cdata)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    del result
    return sizes


def saved_bytes(run: Callable[[], Any], known: Iterable[torch.Tensor] = ()) -> int:
    """Bytes that ``run()`` leaves behind for the backward, without those of ``known``."""
    return sum(saved_storages(run, known).values())
