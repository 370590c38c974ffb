"""The peak of a window, as far as it is known without cost, or measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gradstow._plan import Plan
from gradstow.capture import device_of, resident_bytes, tensors
from gradstow.cost import measure_peak, paused


class Peak:
    """All live bytes at the worst moment; None where nothing is known."""

    def __init__(self) -> None:
        self.bytes: int | None = None

    def see(self, plan: Plan | None) -> None:
        """A micro-batch ran by this plan, or by none."""
        if plan is not None:
            self.bytes = max(self.bytes or 0, plan.predicted_peak_bytes)


@contextlib.contextmanager
def peak_of(
    model: torch.nn.Module, batch: Any, optimizers: Sequence[torch.optim.Optimizer], measure: bool
) -> Iterator[Peak]:
    """Of what runs inside: measured where asked for, else the allocator's on CUDA; on CPU what its plans predict."""
    peak, device = Peak(), device_of(model)
    if measure:
        there = resident_bytes(model, batch, device).total + _state_bytes(optimizers, device)
        with measure_peak(device) as memory:
            yield peak
        peak.bytes = there + memory.peak_bytes
    elif device == "cuda":
        with paused():  # a measurement of the user's goes on with what it had seen
            torch.cuda.reset_peak_memory_stats()
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated()
    else:
        yield peak


def _state_bytes(optimizers: Sequence[torch.optim.Optimizer], device: str) -> int:
    states = [tensors(list(entries.values())) for o in optimizers for entries in o.state.values()]
    return sum(t.untyped_storage().nbytes() for found in states for t in found if t.device.type == device)
