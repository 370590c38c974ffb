"""What a forward saves for its backward, counted exactly: through ``torch.autograd.graph.saved_tensors_hooks``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


def saved_storages(run: Callable[[], Any], known: Iterable[torch.Tensor] = ()) -> dict[int, int]:
    """Bytes of every storage that autograd saves while ``run()`` runs, by the storage's address.

    Each storage counts once, however many views of it are saved, and whole. Those of ``known`` (the parameters, the
    input) are left out. Everything saved is held until the end, so that no address is used twice.
    """
    left_out = {tensor.untyped_storage().data_ptr() for tensor in known}
    held: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor.detach())  # a tensor that knows its node, held by that node, would never be given up
        return held[-1]

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    del result
    return {address: size for address, size in found.items() if address not in left_out and size}


def saved_bytes(run: Callable[[], Any], known: Iterable[torch.Tensor] = ()) -> int:
    """Bytes that ``run()`` leaves behind for the backward, without those of ``known``."""
    return sum(saved_storages(run, known).values())
