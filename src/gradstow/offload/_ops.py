"""Operators that move a value to another place and back, while others run. A ticket stands for it meanwhile.

``gradstow::send`` takes a dense tensor, the whole of its memory, starts to write it and returns a ticket: eight bytes
on the CPU. ``gradstow::sent`` waits until it is written; only then its memory may be given up. What ``sent`` returns
is the ticket for the way back, and the slot is free again when nobody holds it any more. ``gradstow::fetch`` makes a
tensor of the same layout and starts to read into it, as often as wanted; ``arrived`` waits for that, and must be
called before anything reads the tensor. Exact: the bytes come back as they were, and a checksum says so.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gradstow._errors import OffloadError, warn_user
from gradstow.offload._store import Memory, Store, store_in

_LIBRARY = torch.library.Library("gradstow", "FRAGMENT")
# the tag says what a random op's says: not to be run again
_LIBRARY.define("send(Tensor x, str place) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_LIBRARY.define("sent(Tensor x, Tensor ticket) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_LIBRARY.define("fetch(Tensor ticket, str place, int[] size, int[] stride, ScalarType dtype, Device device) -> Tensor")


@dataclass(slots=True)
class _Sent:
    """A value that is on its way, or there. ``holders``: tickets for it."""

    store: Store | Memory
    writing: Future[Any]
    holders: int = 0


_numbers = itertools.count(1)
_values: dict[int, _Sent] = {}
_reading: dict[int, Future[None]] = {}  # address of memory → what is read into it
_lock = threading.Lock()


def _send(x: torch.Tensor, place: str) -> torch.Tensor:
    store = store_in(place)
    number = next(_numbers)
    _values[number] = _Sent(store, store.worker.submit(store.write, _bytes(x)))
    return _ticket(number)


def _sent(x: torch.Tensor, ticket: torch.Tensor) -> torch.Tensor:
    number = int(ticket)
    _wait(_values[number].writing)
    return _ticket(number)


def put_away(x: torch.Tensor, place: str) -> torch.Tensor:
    """Write a tensor that is dense in memory at once, and return a ticket. Where that fails it stays in memory."""
    number, writing, data = next(_numbers), Future[Any](), _bytes(x.cpu())
    store: Store | Memory
    try:
        store = store_in(place)
        writing.set_result(store.write(data))
    except OffloadError as error:
        warn_user(f"{error} For now {data.nbytes} bytes stay in memory beyond the budget.")
        store = Memory()
        writing.set_result(store.write(data))
    _values[number] = _Sent(store, writing)
    return _ticket(number)


def take_back(ticket: torch.Tensor, x: torch.Tensor) -> None:
    """Read what ``put_away`` wrote into a tensor that is dense in memory.

    Raises:
        OffloadError: it cannot be read, or is not what was written.
    """
    value, target = _values[int(ticket)], x if x.device.type == "cpu" else torch.empty_like(x, device="cpu")
    value.store.read(value.writing.result(), _bytes(target))
    if target is not x:
        x.copy_(target)


def _ticket(number: int) -> torch.Tensor:
    held = np.array([number])
    with _lock:
        _values[number].holders += 1
    weakref.finalize(held, _let_go, number).atexit = False
    return torch.from_numpy(held)  # the tensor's memory holds the array, and so do all its views


def _let_go(number: int) -> None:
    with _lock:
        value = _values[number]
        value.holders -= 1
        if value.holders:
            return
        del _values[number]
    value.writing.add_done_callback(lambda done: None if done.exception() else value.store.free(done.result()))


def _fetch(
    ticket: torch.Tensor, place: str, size: list[int], stride: list[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    x = torch.empty_strided(size, stride, dtype=dtype, device=device)
    value = _values[int(ticket)]  # ``sent`` saw it written
    assert isinstance(value.store, Store), "send wrote it"
    reading = value.store.worker.submit(value.store.read, value.writing.result(), _bytes(x))
    _reading[x.data_ptr()] = reading
    return x


def arrived(x: torch.Tensor) -> None:
    """Wait for what ``fetch`` reads into this tensor's memory.

    Raises:
        OffloadError: it cannot be read, or is not what was written.
    """
    reading = _reading.pop(x.untyped_storage().data_ptr(), None)
    if reading is not None:
        _wait(reading)


def _wait(transfer: Future[Any]) -> None:
    error = transfer.exception()
    if error is not None:  # anew: the worker's own would keep alive all that it is raised through
        raise OffloadError(str(error)) if isinstance(error, OffloadError) else error


def _bytes(x: torch.Tensor) -> np.ndarray:
    """The memory of a dense tensor."""
    flat = x.detach().as_strided((x.numel(),), (1,))
    return flat.numpy() if x.dtype == torch.uint8 else flat.view(torch.uint8).numpy()


for _name, _function in (("send", _send), ("sent", _sent), ("fetch", _fetch)):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
send = torch.ops.gradstow.send.default
sent = torch.ops.gradstow.sent.default
fetch = torch.ops.gradstow.fetch.default
