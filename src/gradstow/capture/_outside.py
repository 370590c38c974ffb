"""Ops that ran outside of any captured graph: what autograd says that they hold until the backward."""

from __future__ import annotations

from typing import Any

import torch

from gradstow.capture._rehearse import storage_key
from gradstow.capture._tree import tensors

_WORKING = 2  # room for the gradients that pass through such ops, in sizes of the largest tensor that they hold


def outside_ops(output: Any, resident: set[int]) -> tuple[tuple[str, ...], int]:
    """Names of the ops behind ``output`` that no graph holds and that keep tensors, and the room to leave for them.

    ``resident``: storages that are there anyway. Parts of the model that Dynamo skips run so, and so do custom
    functions in them. Bytes; an upper bound, for what they keep may be counted as a region's output too.
    """
    names: list[str] = []
    held: dict[int, int] = {}
    todo = [t.grad_fn for t in tensors(output) if t.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        saved = {storage_key(t): t.untyped_storage().nbytes() for t in _saved(node)}
        saved = {key: nbytes for key, nbytes in saved.items() if key not in resident}
        if saved:
            names.append(node.name().removesuffix("0").removesuffix("Backward"))
            held.update(saved)
        new = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= new
        todo += new
    return tuple(sorted(names)), sum(held.values()) + _WORKING * max(held.values(), default=0)


def _saved(node: Any) -> list[torch.Tensor]:
    if "CompiledFunction" in node.name():
        return []
    own = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    own += getattr(node, "saved_tensors", None) or ()
    return [t for t in tensors(own) if t.layout is torch.strided]
