"""Tensors in containers: torch's pytrees, and dataclasses, which torch takes for leaves."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map


def leaves(item: Any) -> list[Any]:
    """Everything that is not a container, in order."""
    found: list[Any] = []
    for leaf in tree_leaves(item):
        found += leaves(_fields(leaf)) if _is_dataclass(leaf) else [leaf]
    return found


def tensors(item: Any) -> list[torch.Tensor]:
    """The tensors among the leaves."""
    return [leaf for leaf in leaves(item) if isinstance(leaf, torch.Tensor)]


def storage_key(tensor: torch.Tensor) -> int:
    """Tells storages apart, while they live."""
    return tensor.untyped_storage()._cdata


def map_tensors(item: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """``item`` with ``change`` applied to every tensor; containers are new, other leaves the same."""

    def apply(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        if not _is_dataclass(leaf):
            return leaf
        twin = copy.copy(leaf)
        for name, value in _fields(leaf).items():
            object.__setattr__(twin, name, map_tensors(value, change))  # frozen ones too
        return twin

    return tree_map(apply, item)


def batch_signature(item: Any) -> str:
    """The layouts of a batch's tensors and the containers around them, as text: what a plan is made for."""
    flat, spec = tree_flatten(item)
    return f"{' '.join(_leaf_layout(leaf) for leaf in flat)} {spec}".replace("torch.", "")


def _leaf_layout(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{tuple(leaf.shape)}{leaf.dtype}"
    if _is_dataclass(leaf):
        return f"{type(leaf).__name__}({batch_signature(_fields(leaf))})"
    return repr(type(leaf).__name__)


def _is_dataclass(item: Any) -> bool:
    return dataclasses.is_dataclass(item) and not isinstance(item, type)


def _fields(item: Any) -> dict[str, Any]:
    return {f.name: getattr(item, f.name) for f in dataclasses.fields(item) if hasattr(item, f.name)}
