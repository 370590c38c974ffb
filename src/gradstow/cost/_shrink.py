"""Costs of calls that are too large to run: the same call on fewer samples, or bytes and FLOPs over rates."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from gradstow.cost._analytic import roofline
from gradstow.cost._inputs import Sizes, sizes, storage_items
from gradstow.ir import OpCost


@dataclass(frozen=True, slots=True)
class Shrunk:
    """A smaller call, and by what to multiply its costs."""

    signature: str
    scale: float


def shrink(signature: str, full: Sizes, limit_bytes: int) -> Shrunk | None:
    """The call with its outermost dimension cut so that it fits; None where that is not surely the same work.

    The dimension is the outermost one of the largest input. Wherever its size n stands (outermost in
    another tensor, first in a list of sizes, as a number), it is cut too. Not tried where n also stands
    inside a tensor, because then it may mean channels; given up where an output changes in any other
    way than n -> n' in one dimension.
    """
    call = json.loads(signature)
    layouts = list(_layouts(call))
    if not layouts or full.outputs is None:
        return None
    largest = max(layouts, key=lambda layout: storage_items(layout[0], layout[1]))
    size = largest[0][_outermost(largest)] if largest[0] else 1
    if any(_is_inside(layout, size) for layout in layouts):
        return None
    smaller = min(size - 1, size * limit_bytes // max(1, full.total_bytes))
    while smaller >= 1:
        text = json.dumps(_cut(call, size, smaller), separators=(",", ":"), sort_keys=True)
        cut = sizes(text)
        if not _same_work(full, cut, size, smaller):
            return None
        if cut.fits(limit_bytes):
            return Shrunk(text, size / smaller)
        smaller //= 2
    return None


def analytic(signature: str, full: Sizes, device: torch.device) -> OpCost:
    """Roofline cost, with the rates of a large copy and a large matmul on this device."""
    return roofline(signature, full, bandwidth(device), lambda dtype: flop_rate(device, dtype))


@lru_cache(maxsize=8)
def bandwidth(device: torch.device) -> float:
    """Bytes per second of a copy of 16 MiB, reads and writes counted; measured once per process."""
    source = torch.ones(4 << 20, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.untyped_storage().nbytes() / _best_seconds(lambda: target.copy_(source), device)


@lru_cache(maxsize=8)
def flop_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of a square matmul; measured once per process and dtype."""
    size = 512 if device.type == "cpu" else 4096
    square = torch.ones(size, size, dtype=dtype, device=device)
    return 2 * size**3 / _best_seconds(lambda: square @ square, device)


def _best_seconds(run: Any, device: torch.device) -> float:
    best = float("inf")
    for _ in range(4):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _layouts(item: Any) -> Iterator[tuple[list[int], list[int]]]:
    if isinstance(item, list):
        for part in item:
            yield from _layouts(part)
    elif isinstance(item, dict):
        if "T" in item:
            yield item["T"][0], item["T"][1]
        else:
            yield from _layouts(list(item.values()))


def _outermost(layout: tuple[list[int], list[int]]) -> int:
    """The dimension with the largest step; an expanded first dimension counts as outermost."""
    shape, stride = layout
    if stride[0] == 0 and shape[0] > 1:
        return 0
    return max(range(len(shape)), key=lambda dim: (stride[dim] if shape[dim] > 1 else -1, -dim))


def _is_inside(layout: tuple[list[int], list[int]], size: int) -> bool:
    shape, _ = layout
    return any(length == size and dim != _outermost(layout) for dim, length in enumerate(shape))


def _cut(item: Any, size: int, smaller: int) -> Any:
    """The call's JSON with ``size`` replaced wherever it stands for the outermost dimension."""
    if isinstance(item, bool):
        return item
    if isinstance(item, int):
        return smaller if item == size else item
    if isinstance(item, list):
        if item and all(isinstance(part, int) for part in item):
            return [_cut(item[0], size, smaller), *item[1:]]
        return [_cut(part, size, smaller) for part in item]
    if not isinstance(item, dict):
        return item
    if "T" not in item:
        return {key: _cut(part, size, smaller) for key, part in item.items()}
    shape, stride, dtype, device = item["T"]
    if shape and shape[_outermost((shape, stride))] == size:
        shape = list(shape)
        shape[_outermost((item["T"][0], stride))] = smaller
    return {"T": [shape, stride, dtype, device]}


def _same_work(full: Sizes, cut: Sizes, size: int, smaller: int) -> bool:
    if full.outputs is None or cut.outputs is None or len(full.outputs) != len(cut.outputs):
        return False
    for (before, _), (after, _) in zip(full.outputs, cut.outputs, strict=True):
        if len(before) != len(after):
            return False
        changes = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
        if changes not in ([], [(size, smaller)]):
            return False
    return True
