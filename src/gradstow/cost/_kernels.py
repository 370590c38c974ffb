"""Prices of kernels that a compiler makes: they read their inputs and write their result once."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from typing import Any

import torch

from gradstow.cost._analytic import TRANSFER, Profile
from gradstow.cost._transfers import bandwidth_within
from gradstow.ir import OpCost

_CALL = 3e-6  # seconds of a call beside its bytes


def kernel_costs(signatures: Collection[str], device: str, profile: Profile | None = None) -> dict[str, OpCost]:
    """The price of those ops that are kernels: bytes over bandwidth. They need no memory beside their result."""
    texts = [text for text in signatures if text.startswith('["gradstow.kernel",')]
    if not texts:
        return {}
    threads = torch.get_num_threads()
    rate = bandwidth_within(device, threads) if profile is None else TRANSFER * profile.bandwidth
    return {text: OpCost(_CALL + _bytes(text) / rate, 0, "extrapolated") for text in texts}


def _bytes(text: str) -> int:
    _, reads, makes = json.loads(text)
    return sum(_tensors([reads, makes["makes"]]))


def _tensors(item: Any) -> Iterator[int]:
    if isinstance(item, list):
        for part in item:
            yield from _tensors(part)
    elif isinstance(item, dict) and "T" in item:
        shape, stride, dtype, _ = item["T"]
        there = math.prod(size for size, step in zip(shape, stride, strict=True) if step or size == 0)
        yield there * getattr(torch, dtype).itemsize
