"""How to time a call and find its working memory on each kind of device."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from gradstow._errors import GradstowError
from gradstow.cost._events import Event, Level, Session, mark
from gradstow.cost._inputs import forget_noise, real_call, tensors_in

_FEWEST, _MOST, _SECONDS = 3, 7, 0.03


class Machine(Protocol):
    """One device: what it is called, and the two measurements."""

    device: torch.device

    def working_bytes(self, signatures: Sequence[str], tick: Callable[[], None]) -> list[int | None]:
        """Allocator peak of each call less its new outputs; None where the call cannot run."""
        ...

    def seconds(self, signature: str) -> float:
        """Median wall time of the call. Raises whatever the call raises."""
        ...


def machine_of(device: str) -> Machine:
    """The machine behind ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.

    Raises:
        GradstowError: for a device that is not here or whose ops cannot be measured.
    """
    chosen = torch.device(device)
    if chosen.type == "cpu":
        return Cpu()
    if chosen.type == "cuda" and torch.cuda.is_available():
        return Cuda(torch.device("cuda", chosen.index or 0))
    raise GradstowError(
        f"the costs of ops on {device!r} cannot be measured: this process has no such device, or it is "
        'neither "cpu" nor "cuda".'
    )


def device_name(device: str) -> str:
    """The hardware's own name, such as ``"cpu AMD EPYC 7763"``; costs hold for it only."""
    chosen = torch.device(device)
    if chosen.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(chosen)}"
    return f"{chosen.type} {_processor() or platform.machine()}"


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Ops run as the graph holds them, and the global random generators end as they began."""
    cuda = [device.index] if device.type == "cuda" else []
    # Signatures are of ops after autocast: an autocast around us would run other ops in their place.
    off = [torch.autocast(kind, enabled=False) for kind in ("cpu", "cuda")]
    try:
        with torch.random.fork_rng(cuda), torch.no_grad(), off[0], off[1]:
            yield
    finally:
        forget_noise()


class Cpu:
    """The host. One profiler session serves all calls, since starting one takes a millisecond."""

    device = torch.device("cpu")

    def working_bytes(self, signatures: Sequence[str], tick: Callable[[], None]) -> list[int | None]:
        made: dict[int, set[int]] = {}
        session = Session()
        session.start()
        try:
            for index, signature in enumerate(signatures):
                addresses = _run_marked(signature, index, self.device)
                if addresses is not None:
                    made[index] = addresses
                tick()
        finally:
            recording = session.stop()
        peaks: list[int | None] = [None] * len(signatures)
        for index, events in recording.marked():
            if index in made:
                peaks[index] = _working(events, made[index])
        return peaks

    def seconds(self, signature: str) -> float:
        call = real_call(signature, self.device)

        def once() -> float:
            start = time.perf_counter()
            out = call.run()
            end = time.perf_counter()
            del out
            return end - start

        return _least(once)


class Cuda:
    """One CUDA device; resets the allocator's peak counter."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def working_bytes(self, signatures: Sequence[str], tick: Callable[[], None]) -> list[int | None]:
        peaks = []
        for signature in signatures:
            peaks.append(self._working(signature))
            tick()
        return peaks

    def _working(self, signature: str) -> int | None:
        try:
            call = real_call(signature, self.device)
            call.run()  # libraries allocate their own workspaces once, at first use
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            out = call.run()
            torch.cuda.synchronize(self.device)
        except Exception:  # an op may refuse synthesised inputs with any error; the cost is "unknown"
            return None
        working = torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)
        del out
        return working

    def seconds(self, signature: str) -> float:
        call = real_call(signature, self.device)
        with torch.cuda.device(self.device):
            event: Any = torch.cuda.Event
            start, end = event(enable_timing=True), event(enable_timing=True)

            def once() -> float:
                torch.cuda.synchronize(self.device)
                start.record()
                out = call.run()
                end.record()
                torch.cuda.synchronize(self.device)
                del out
                return float(start.elapsed_time(end)) * 1e-3

            return _least(once)


def _least(once: Callable[[], float]) -> float:
    """The least of 3 to 7 runs, as many as fit into 30 ms, after one that warms up."""
    first = once()
    runs = int(_SECONDS / max(first, 1e-9))
    return min(once() for _ in range(min(max(runs, _FEWEST), _MOST)))


def _run_marked(signature: str, index: int, device: torch.device) -> set[int] | None:
    """Run the call under its mark; the addresses of its outputs, or None where it cannot run."""
    try:
        call = real_call(signature, device)
        with mark(index):
            out: Any = call.run()
    except Exception:  # an op may refuse synthesised inputs with any error; the cost is "unknown"
        return None
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_in(out)}


def _working(events: Sequence[Event], outputs: set[int]) -> int:
    """Peak of the events less the outputs among the blocks that they leave."""
    level = Level()
    for event in events:
        level.apply(event)
    return level.peak - sum(size for address, size in level.blocks.items() if address in outputs)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
