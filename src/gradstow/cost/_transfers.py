"""How fast a place takes and gives bytes, measured once."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gradstow._errors import OffloadError
from gradstow._units import format_bytes
from gradstow.cost._cache import cache_folder, write_whole
from gradstow.ir import OpCost
from gradstow.offload import Store, store_in

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
def bandwidth_of(place: str) -> Bandwidth:
    """Measured once per place, and kept beside the costs of ops for the next process."""
    path = cache_folder() / "bandwidth.json"
    name = f"{place} on device {os.stat(store_in(place).folder).st_dev}"
    known = _read(path)
    if name not in known:
        known[name] = _measured(store_in(place))
        _write(path, known)
    return Bandwidth(*known[name])


def _measured(store: Store) -> tuple[float, float]:
    try:
        return _try(store, _TRIED[0])
    except OffloadError:
        return _try(store, _TRIED[1])


def _try(store: Store, nbytes: int) -> tuple[float, float]:
    """The best of some tries: what else runs only slows it down."""
    data = np.random.default_rng(0).integers(0, 255, nbytes, dtype=np.uint8)
    there, back = [], []
    for _ in range(_TRIES):
        start = time.perf_counter()
        slot = store.write(data)
        between = time.perf_counter()
        store.read(slot, data)
        there.append(between - start)
        back.append(time.perf_counter() - between)
        store.free(slot)
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


def transfer_costs(signatures: Collection[str]) -> dict[str, OpCost]:
    """The price of those ops that go to a place or come back, by the place's bandwidth.

    A transfer runs beside other ops. From them it takes the time of the core that copies: its part of the threads.
    """
    found = {text: OpCost(_CALL) for text in signatures if text.startswith('["gradstow.sent.')}
    for text in signatures:
        if text.startswith(('["gradstow.send.', '["gradstow.fetch.')):
            nbytes, place, back = _call(text)
            seconds = bandwidth_of(place).seconds(nbytes, back=back)
            found[text] = OpCost(_CALL + seconds / max(torch.get_num_threads(), 2), transfer=seconds)
    return found


def _call(signature: str) -> tuple[int, str, bool]:
    """Bytes, place and direction of a transfer."""
    target, args, _ = json.loads(signature)
    back = target.startswith("gradstow.fetch")
    shape, dtype = (args[2], args[4]["torch"][1]) if back else (args[0]["T"][0], args[0]["T"][2])
    return math.prod(shape) * getattr(torch, dtype).itemsize, args[1], back
