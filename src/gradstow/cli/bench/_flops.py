"""How much of the machine a training step uses: its floating-point operations against what matrix products reach."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

_SIDE, _ROUNDS = 1536, 7


def counted_flops(step: Callable[[], Any]) -> int:
    """Floating-point operations of matrix products, convolutions and attention in ``step()``; two per multiply-add."""
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


def matmul_peak(side: int = _SIDE, rounds: int = _ROUNDS) -> float:
    """FLOP/s of the fastest of a few float32 products of two ``side`` × ``side`` matrices, on this machine and now."""
    with torch.random.fork_rng(devices=[]):
        left, right = torch.randn(side, side), torch.randn(side, side)
    result = torch.empty(side, side)
    fastest = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        torch.mm(left, right, out=result)
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * side**3 / fastest
