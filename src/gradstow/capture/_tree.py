"""Tensors in containers: torch's pytrees, and what torch takes for leaves: dataclasses, and objects that hold tensors,
such as the caches of transformers."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map


def leaves(item: Any, around: tuple[int, ...] = ()) -> list[Any]:
    """Everything that is not a container, in order. An object counts as one where a tensor is in it."""
    found: list[Any] = []
    for leaf in tree_leaves(item):
        inside = _inside(leaf, around)
        found += [leaf] if inside is None else inside
    return found


def tensors(item: Any) -> list[torch.Tensor]:
    """The tensors among the leaves."""
    return [leaf for leaf in leaves(item) if isinstance(leaf, torch.Tensor)]


def dense_parts(item: Any) -> tuple[torch.Tensor, ...]:
    """The dense tensors that a tensor consists of: itself, or indices and values of a sparse one."""
    if not isinstance(item, torch.Tensor):
        return ()
    if item.layout is torch.sparse_coo:
        return item._indices(), item._values()
    return (item,) if item.layout is torch.strided else ()


def storage_key(tensor: torch.Tensor) -> int:
    """Tells storages apart, while they live."""
    return tensor.untyped_storage()._cdata


def map_tensors(
    item: Any, change: Callable[[torch.Tensor], Any], other: Callable[[Any], Any] = lambda leaf: leaf
) -> Any:
    """``item`` with ``change`` applied to every tensor, and ``other`` to other leaves; containers are new."""

    def apply(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        if not _is_dataclass(leaf):
            return other(leaf)
        twin = copy.copy(leaf)
        for name, value in _fields(leaf).items():
            object.__setattr__(twin, name, map_tensors(value, change, other))  # frozen ones too
        return twin

    return tree_map(apply, item)


def batch_signature(item: Any) -> str:
    """The layouts of a batch's tensors and the containers around them, as text: what a plan is made for."""
    flat, spec = tree_flatten(item)
    return f"{' '.join(_leaf_layout(leaf) for leaf in flat)} {spec}".replace("torch.", "")


def _leaf_layout(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{tuple(leaf.shape)}{leaf.dtype}"
    if _inside(leaf) is not None:
        return f"{type(leaf).__name__}({batch_signature(_fields(leaf))})"
    return repr(type(leaf).__name__)


def _is_dataclass(item: Any) -> bool:
    return dataclasses.is_dataclass(item) and not isinstance(item, type)


def _inside(leaf: Any, around: tuple[int, ...] = ()) -> list[Any] | None:
    """The leaves of a dataclass, or of an object that holds tensors; None for any other."""
    if _is_dataclass(leaf):
        return leaves(_fields(leaf), around)
    if isinstance(leaf, type | torch.Tensor | torch.nn.Module | types.ModuleType) or id(leaf) in around:
        return None
    if not hasattr(leaf, "__dict__"):
        return None
    found = leaves(vars(leaf), (*around, id(leaf)))
    return found if any(isinstance(x, torch.Tensor) for x in found) else None


def _fields(item: Any) -> dict[str, Any]:
    if not _is_dataclass(item):
        return dict(vars(item))
    return {f.name: getattr(item, f.name) for f in dataclasses.fields(item) if hasattr(item, f.name)}
