"""Ops that ran outside of any captured graph: what autograd says that they hold until the backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gradstow.capture._tree import storage_key, tensors

_WORKING = 2  # room for the gradients that pass through such ops, in sizes of the largest tensor that they hold


def outside_ops(output: Any, resident: set[int], received: Mapping[int, int]) -> tuple[tuple[str, ...], int]:
    """Names of the ops behind ``output`` that no graph holds and that keep tensors, and the room to leave for them.

    ``resident``: storages that are there anyway. ``received``: storage → bytes of what graphs took in that no graph
    made. Parts of the model that Dynamo skips run so, and so do custom functions in them. Bytes; an upper bound, for
    what they keep may be counted as a region's output too.
    """
    names: list[str] = []
    held: dict[int, int] = {}
    gradients: dict[int, int] = {}  # of parameters that such ops read
    todo = [t.grad_fn for t in tensors(output) if t.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        saved = {storage_key(t): t.untyped_storage().nbytes() for t in _saved(node)}
        saved = {key: nbytes for key, nbytes in saved.items() if key not in resident}
        if saved:
            names.append(node.name().removesuffix("0").removesuffix("Backward"))
            held.update(saved)
        following = {n for n, _ in node.next_functions if n is not None}
        if "CompiledFunction" not in node.name():
            leaves = [n.variable for n in following if hasattr(n, "variable")]  # those that a graph reads too
            gradients.update((storage_key(v), v.nbytes) for v in leaves)
        new = following - seen
        seen |= new
        todo += new
    # what a graph took in, and its gradient
    taken = {key: nbytes for key, nbytes in received.items() if key not in resident}
    passing = sum(taken.values()) + sum(nbytes for key, nbytes in taken.items() if key not in held)
    room = sum(held.values()) + _WORKING * max(held.values(), default=0) + sum(gradients.values()) + passing
    return tuple(sorted(names)), room


def saved_after(outputs: Any, inputs: Any) -> int:
    """Bytes that the ops between ``inputs`` and ``outputs`` keep for the backward, beside the inputs."""
    given = tensors(inputs)
    ends = {t.grad_fn for t in given}
    known = {storage_key(t) for t in given if t.layout is torch.strided}
    todo = [t.grad_fn for t in tensors(outputs) if t.grad_fn is not None and t.grad_fn not in ends]
    seen = set(todo)
    held: dict[int, int] = {}
    while todo:
        node = todo.pop()
        held.update((storage_key(t), t.untyped_storage().nbytes()) for t in _saved(node))
        new = {n for n, _ in node.next_functions if n is not None} - seen - ends
        seen |= new
        todo += new
    return sum(nbytes for key, nbytes in held.items() if key not in known)


def _saved(node: Any) -> list[torch.Tensor]:
    if "CompiledFunction" in node.name():
        return []
    own = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    own += getattr(node, "saved_tensors", None) or ()
    return [t for t in tensors(own) if t.layout is torch.strided]
