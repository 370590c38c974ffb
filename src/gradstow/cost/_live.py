"""What this process holds right now, as its allocator or the system tells it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from gradstow._units import format_bytes
from gradstow.cost._memory import choose_device, status_bytes


@dataclass(frozen=True, slots=True)
class Memory:
    """One reading; bytes.

    Attributes:
        allocated_bytes: of live tensors; None on a CPU, whose allocator does not count.
        reserved_bytes: what the process has of the device: the caching allocator's blocks on CUDA, the resident set on
            a CPU. None where the system cannot tell.
        peak_bytes: the most so far: of ``allocated_bytes`` on CUDA, of the resident set on a CPU.
    """

    device: str
    allocated_bytes: int | None
    reserved_bytes: int | None
    peak_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        shown = (("allocated", self.allocated_bytes), ("reserved", self.reserved_bytes), ("peak", self.peak_bytes))
        parts = (f"{name} {'unknown' if count is None else format_bytes(count)}" for name, count in shown)
        return f"{self.device}: {', '.join(parts)}"


def memory(device: str | torch.device | None = None) -> Memory:
    """What this process holds now, and held at most so far. Takes microseconds; for a log line in a training loop.

    Args:
        device: "cpu" or "cuda[:i]"; None takes CUDA where this process already uses it, else the CPU.

    On a CPU these are the resident set and its high-water mark, which include Python, libraries and freed blocks that
    the C library keeps; ``measure_peak`` counts tensors exactly, for a block of code.

    Raises:
        GradstowError: another kind of device.
    """
    chosen = choose_device(device, "memory")
    if chosen.type == "cpu":
        return Memory("cpu", None, status_bytes("VmRSS"), status_bytes("VmHWM"))
    counts = (torch.cuda.memory_allocated, torch.cuda.memory_reserved, torch.cuda.max_memory_allocated)
    return Memory(str(chosen), *(int(count(chosen)) for count in counts))
