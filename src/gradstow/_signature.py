"""The canonical text of one op call: what it computes, on which layouts. Key of the cost table.

Tensors become ``{"T": [shape, stride, dtype, device]}``, in ``{"lazy": [view, ...]}`` where they are only marked as
conjugated or negated: many kernels make such a tensor anew in memory of their own. Everything else that JSON does not
know becomes an object with one key that names its type. ``decode`` turns the text back into a call.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import torch

import gradstow._lossy  # noqa: F401 (as with _ops, importing it registers operators that a target may name)
import gradstow._ops as ops

OPS_VERSION = ops.VERSION
_LAZY = {"aten._conj.default": torch.is_conj, "aten._neg_view.default": torch.is_neg}  # the view → what marks it


class _Unencodable(TypeError):
    """The call holds something that has no canonical text."""


def encode(target: str, args: Any, kwargs: Any) -> str:
    """Text of the call ``target(*args, **kwargs)``; "" where an argument has no canonical text."""
    try:
        return json.dumps([target, _pack(args), _pack(kwargs)], separators=(",", ":"), sort_keys=True)
    except _Unencodable:
        return ""


def decode(signature: str, make_tensor: Callable[[list[int], list[int], torch.dtype, str], Any]) -> Any:
    """The call again: ``(callable, args, kwargs)``, tensors by ``make_tensor(shape, stride, dtype, device)``."""
    target, args, kwargs = json.loads(signature)
    return resolve(target), _unpack(args, make_tensor), _unpack(kwargs, make_tensor)


def resolve(target: str) -> Any:
    """The operator that a target such as ``"aten.mm.default"`` names."""
    namespace, name, overload = target.split(".", 2)
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _pack(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        packed: Any = {"T": [list(item.shape), list(item.stride()), _name(item.dtype), item.device.type]}
        for view, marked in _LAZY.items():
            if marked(item):
                packed = {"lazy": [view, packed]}
        return packed
    if item is None or isinstance(item, (bool, int, str)):
        return item
    if isinstance(item, float):
        return item if math.isfinite(item) else {"float": repr(item)}
    if isinstance(item, (list, tuple)):
        return [_pack(i) for i in item]
    if isinstance(item, dict):
        return {str(k): _pack(v) for k, v in item.items()}
    for kind, text in (
        (torch.dtype, "dtype"),
        (torch.memory_format, "memory_format"),
        (torch.layout, "layout"),
    ):
        if isinstance(item, kind):
            return {"torch": [text, _name(item)]}
    if isinstance(item, torch.device):
        return {"torch": ["device", item.type]}
    raise _Unencodable(type(item).__name__)


def _unpack(item: Any, make_tensor: Any) -> Any:
    if isinstance(item, list):
        return [_unpack(i, make_tensor) for i in item]
    if not isinstance(item, dict):
        return item
    if "T" in item:
        shape, stride, dtype, device = item["T"]
        return make_tensor(shape, stride, getattr(torch, dtype), device)
    if "lazy" in item:
        view, base = item["lazy"]
        return resolve(view)(_unpack(base, make_tensor))
    if "float" in item:
        return float(item["float"])
    if "torch" in item:
        kind, name = item["torch"]
        return torch.device(name) if kind == "device" else getattr(torch, name)
    return {k: _unpack(v, make_tensor) for k, v in item.items()}


def _name(item: Any) -> str:
    return str(item).removeprefix("torch.")
