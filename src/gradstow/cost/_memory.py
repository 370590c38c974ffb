"""The allocator's peak over a block of code, exact in bytes, with the process's resident set beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

from gradstow._errors import GradstowError
from gradstow._units import format_bytes
from gradstow.cost._events import Level, Session

_active: PeakMemory | None = None


def measure_peak(device: str | torch.device | None = None) -> PeakMemory:
    """Measure the allocator's peak over a ``with`` block.

    Args:
        device: "cpu" or "cuda[:i]"; None takes CUDA where this process already uses it, else the CPU.

    On CPU torch's allocator tells nothing about blocks that were alive at entry, so these count as alive
    throughout: freeing them inside does not lower the level, and the peak is an upper bound. Memory of
    threads started inside the block, and of libraries with their own allocator (oneDNN's scratchpads),
    is not seen; ``rss_peak_bytes`` includes both. Costs a few microseconds per op.

    On CUDA the caching allocator's peak counter is reset, and frees of earlier blocks do count.

    Raises:
        GradstowError: at entry inside another measurement or under a running torch profiler; at exit
            where the recording is incomplete.
    """
    return PeakMemory(device)


class PeakMemory:
    """What ``measure_peak`` measured; all bytes are above what was alive at entry."""

    def __init__(self, device: str | torch.device | None = None) -> None:
        self.device = choose_device(device, "measure_peak")
        self._meter: _Meter | None = None
        self._resident = _ResidentSet()
        self._done = False

    @property
    def peak_bytes(self) -> int:
        """Highest live bytes."""
        return self._read().peak

    @property
    def end_bytes(self) -> int:
        """Live bytes at exit."""
        return self._read().end

    @property
    def timeline(self) -> tuple[tuple[float, int], ...]:
        """(seconds since entry, live bytes) after each allocator event, in time order; empty on CUDA."""
        return self._read().timeline

    @property
    def rss_peak_bytes(self) -> int | None:
        """Highest growth of the resident set; None where the system cannot tell."""
        self._read()
        return self._resident.growth

    def __repr__(self) -> str:
        if not self._done:
            return f"<PeakMemory on {self.device}, no result yet>"
        peak, end = format_bytes(self.peak_bytes), format_bytes(self.end_bytes)
        return f"<PeakMemory on {self.device}: peak {peak}, at the end {end}>"

    def __enter__(self) -> PeakMemory:
        global _active
        if _active is not None:
            raise GradstowError(
                "measure_peak is already running, and the allocator has one peak only. "
                "Measure one block after the other, or read the outer measurement's timeline."
            )
        if self._meter is not None:
            raise GradstowError("this measurement has run already. Call measure_peak() for each block.")
        meter = _Cpu() if self.device.type == "cpu" else _Cuda(self.device)
        self._resident.start()
        meter.start()
        self._meter = meter
        _active = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _active
        _active = None
        assert self._meter is not None
        self._resident.stop()
        try:
            self._meter.stop()
            self._done = True
        except GradstowError:
            if error is None:
                raise
            # The block's own error is the news; reading the attributes will still be refused.

    def _read(self) -> _Meter:
        if self._meter is None or not self._done:
            raise GradstowError(
                "the measurement has no result yet. Read it after the `with measure_peak()` block "
                "has ended without losing events."
            )
        return self._meter


@contextmanager
def paused() -> Iterator[None]:
    """Leave what happens inside out of a measurement that is running, if one is.

    Measuring costs in the first step of a stowed model is not part of the step, and needs the profiler.
    """
    meter = None if _active is None else _active._meter
    if meter is None:
        yield
        return
    meter.stop()
    try:
        yield
    finally:
        meter.start()


class _Meter(Protocol):
    """Counts while started; ``start`` and ``stop`` may alternate, and the result adds up."""

    peak: int
    end: int
    timeline: tuple[tuple[float, int], ...]

    def start(self) -> None: ...

    def stop(self) -> None: ...


class _Cpu:
    def __init__(self) -> None:
        self.peak, self.end = 0, 0
        self.timeline: tuple[tuple[float, int], ...] = ()
        self._level = Level()
        self._session = Session()
        self._entry: int | None = None

    def start(self) -> None:
        self._session.start()

    def stop(self) -> None:
        recording = self._session.stop()
        if self._entry is None:
            self._entry = recording.started
        points = []
        for event in recording.events:
            self._level.apply(event)
            points.append(((event.nanoseconds - self._entry) * 1e-9, self._level.now))
        self.timeline += tuple(points)
        self.peak, self.end = self._level.peak, self._level.now


class _Cuda:
    def __init__(self, device: torch.device) -> None:
        self.peak, self.end = 0, 0
        self.timeline: tuple[tuple[float, int], ...] = ()
        self._device = device
        self._base: int | None = None

    def start(self) -> None:
        torch.cuda.synchronize(self._device)
        if self._base is None:
            self._base = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def stop(self) -> None:
        assert self._base is not None
        torch.cuda.synchronize(self._device)
        self.peak = max(self.peak, torch.cuda.max_memory_allocated(self._device) - self._base)
        self.end = torch.cuda.memory_allocated(self._device) - self._base


class _ResidentSet:
    """Growth of the resident set's high-water mark, which Linux resets on request."""

    growth: int | None = None

    def start(self) -> None:
        self._before = status_bytes("VmRSS")
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:  # not Linux, or a container that forbids it: the mark would be of the whole run
            self._before = None

    def stop(self) -> None:
        highest = status_bytes("VmHWM")
        if self._before is not None and highest is not None:
            self.growth = max(0, highest - self._before)


def status_bytes(name: str) -> int | None:
    """A line of this process's status; None where the system has none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    found = [line for line in lines if line.startswith(name + ":")]
    return int(found[0].split()[1]) * 1024 if found else None


def choose_device(device: str | torch.device | None, what: str) -> torch.device:
    """``what``: who asks, for the error."""
    if device is None:
        in_use: Any = torch.cuda.is_initialized
        device = "cuda" if torch.cuda.is_available() and in_use() else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise GradstowError(f"{what} knows no device {device!r}. Write cpu, cuda or cuda:0.") from error
    count = torch.cuda.device_count()
    if chosen.type == "cuda" and (chosen.index or 0) >= count:
        raise GradstowError(f"{what} cannot measure on {chosen}: PyTorch sees {count} CUDA devices here.")
    if chosen.type not in ("cpu", "cuda"):
        raise GradstowError(
            f"{what} cannot measure on {chosen.type!r}: it knows the allocators of cpu and cuda. "
            'Pass device="cpu" for the host\'s part.'
        )
    return chosen
