"""What autograd really saves for the backward, by the module that made it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

Makers = dict[int, tuple[weakref.ref[torch.Tensor], str]]  # address → the tensor there, and who returned it


def saved_by_modules(model: torch.nn.Module, forward: Callable[[], Any], known: Collection[int]) -> dict[str, int]:
    """Module path → bytes of what autograd saves while ``forward`` runs, each storage once.

    A tensor belongs to the module that returned it first, or that changed it in place; one that no module returns, to
    the module that runs when it is saved. ``known``: storages that are there anyway, by address.
    """
    path: list[str] = [""]
    makers: Makers = {}
    saved: dict[int, torch.UntypedStorage] = {}  # held, so that no other comes to its address

    def save(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() not in known:
            storage = tensor.untyped_storage()
            there = makers.get(storage.data_ptr())
            if storage.data_ptr() not in saved and (there is None or there[0]() is None):
                makers[storage.data_ptr()] = weakref.ref(tensor), path[-1]
            saved[storage.data_ptr()] = storage
        return tensor.detach()  # no reference from a node of autograd to its own output

    with _paths(model, path, makers, saved), torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        result = forward()
    del result
    found: dict[str, int] = {}
    for address, storage in saved.items():
        name = makers[address][1]
        found[name] = found.get(name, 0) + storage.nbytes()
    return found


@contextmanager
def _paths(model: torch.nn.Module, path: list[str], makers: Makers, saved: Collection[int]) -> Iterator[None]:
    """Inside, ``path`` ends with the module that runs, and ``makers`` has what each one returned."""
    handles = []

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: path.append(name)

    def leave(name: str, last: bool) -> Callable[..., None]:
        def note(_module: Any, _args: Any, output: Any) -> None:
            path.pop()
            for item in _tensors(output):
                address = item.untyped_storage().data_ptr()
                there = makers.get(address)
                before = None if there is None else there[0]()
                free = before is None and address not in saved  # new, or another tensor's that is gone
                if free or (last and before is item):  # what a module returns as it got it, it changed
                    makers[address] = weakref.ref(item), name

        return note

    try:
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(enter(name)))
            handles.append(module.register_forward_hook(leave(name, last=not any(module.children()))))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        if output.layout is torch.strided:
            yield output
    elif isinstance(output, (Mapping, tuple, list)):
        for item in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(item)
