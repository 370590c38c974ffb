"""How fast a place takes and gives bytes, measured once."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from gradstow._errors import OffloadError
from gradstow._units import format_bytes
from gradstow.cost._analytic import TRANSFER, Profile
from gradstow.cost._cache import cache_folder, write_whole
from gradstow.cost._machine import device_name
from gradstow.cost._shrink import bandwidth
from gradstow.ir import OpCost
from gradstow.offload import Place, place_of, store_in

_TRIED = (32 << 20, 1 << 20)  # bytes of one try; fewer where there is no room
_TRIES = 3
_CALL = 3e-5  # seconds of a call beside its bytes


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes a second there and back, checksums included, of one thread."""

    write: float
    read: float

    def seconds(self, nbytes: int, *, back: bool) -> float:
        """What moving so many bytes takes."""
        return nbytes / (self.read if back else self.write)

    def __str__(self) -> str:
        return f"{format_bytes(int(self.write))}/s there, {format_bytes(int(self.read))}/s back"


@functools.cache
def bandwidth_of(place: str, device: str = "cpu") -> Bandwidth:
    """Measured once per place, and kept beside the costs of ops for the next process."""
    name = f"{place} of {device_name(device)}"
    if place != "host":
        name += f" on device {os.stat(store_in(place).folder).st_dev}"
    return Bandwidth(*_kept(name, lambda: _measured(place_of(place), torch.device(device))))


@functools.cache
def bandwidth_within(device: str, threads: int) -> float:
    """Bytes per second of a copy in the device's own memory, kept likewise."""
    name = f"memory of {device_name(device)} with {threads} threads"
    return _kept(name, lambda: (bandwidth(torch.device(device)),) * 2)[0]


def _kept(name: str, measure: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    path = cache_folder() / "bandwidth.json"
    known = _read(path)
    if name not in known:
        known[name] = measure()
        _write(path, known)
    return known[name]


def _measured(place: Place, device: torch.device) -> tuple[float, float]:
    try:
        return _try(place, device, _TRIED[0])
    except OffloadError:
        return _try(place, device, _TRIED[1])


def _try(place: Place, device: torch.device, nbytes: int) -> tuple[float, float]:
    """The best of some tries: what else runs only slows it down."""
    data = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(device)
    there, back = [], []
    for _ in range(_TRIES):
        start = time.perf_counter()
        left = place.leave(data)
        left.wait_whole()
        between = time.perf_counter()
        place.back(left, data).wait_whole()
        there.append(between - start)
        back.append(time.perf_counter() - between)
        place.drop(left)
    return nbytes / min(there), nbytes / min(back)


def _read(path: Path) -> dict[str, tuple[float, float]]:
    try:
        return {str(name): (float(a), float(b)) for name, (a, b) in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # none yet, or damaged: measured anew


def _write(path: Path, known: dict[str, tuple[float, float]]) -> None:
    with contextlib.suppress(OSError):  # then the next process measures again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(known))


def transfer_costs(signatures: Collection[str], device: str, profile: Profile | None = None) -> dict[str, OpCost]:
    """The price of those ops that go to a place or come back, by the place's bandwidth.

    A transfer runs beside other ops. A CPU's takes from them the time of the core that copies: its part of the threads.
    Where a profile stands for a device elsewhere, the bus to its host is by its data sheet; a disk is this machine's.
    """
    found = {text: OpCost(_CALL) for text in signatures if text.startswith('["gradstow.sent.')}
    cores = max(torch.get_num_threads(), 2)
    for text in signatures:
        if text.startswith(('["gradstow.send.', '["gradstow.fetch.')):
            nbytes, place, back = _call(text)
            seconds = _bandwidth(place, device, profile).seconds(nbytes, back=back)
            taken = 0.0 if device == "cuda" or profile is not None else seconds / cores
            found[text] = OpCost(_CALL + taken, transfer=seconds)
    return found


def _bandwidth(place: str, device: str, profile: Profile | None) -> Bandwidth:
    if profile is None:
        return bandwidth_of(place, device)
    bus = TRANSFER * profile.bus
    if place == "host":
        return Bandwidth(bus, bus)
    disk = bandwidth_of(place)
    return Bandwidth(min(disk.write, bus), min(disk.read, bus))


def _call(signature: str) -> tuple[int, str, bool]:
    """Bytes, place and direction of a transfer."""
    target, args, _ = json.loads(signature)
    back = target.startswith("gradstow.fetch")
    shape, dtype = (args[2], args[4]["torch"][1]) if back else (args[0]["T"][0], args[0]["T"][2])
    return math.prod(shape) * getattr(torch, dtype).itemsize, args[1], back
