"""Operators that move a value to another place and back, while others run. A ticket stands for it meanwhile.

``gradstow::send`` takes a dense tensor, the whole of its memory, starts to write it and returns a ticket: eight bytes
on the CPU. ``gradstow::sent`` waits until it is written; only then its memory may be given up. What ``sent`` returns
is the ticket for the way back, and the slot is free again when nobody holds it any more. ``gradstow::fetch`` makes a
tensor of the same layout and starts to read into it, as often as wanted; ``arrived`` waits for that, and must be
called before anything reads the tensor. Exact: the bytes come back as they were, and a checksum says so.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gradstow._errors import OffloadError, warn_user
from gradstow._units import format_bytes
from gradstow.offload._disk import Disk
from gradstow.offload._host import Host
from gradstow.offload._store import store_in
from gradstow.offload._transfer import Place, Transfer

_LIBRARY = torch.library.Library("gradstow", "FRAGMENT")
# the tag says what a random op's says: not to be run again
_LIBRARY.define("send(Tensor x, str place) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_LIBRARY.define("sent(Tensor x, Tensor ticket) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_LIBRARY.define("fetch(Tensor ticket, str place, int[] size, int[] stride, ScalarType dtype, Device device) -> Tensor")
_LIBRARY.define("arrived(Tensor(a!) x) -> ()")  # it has other bytes afterwards


@dataclass(slots=True)
class _Sent:
    """A value that is on its way, or there. ``holders``: tickets for it."""

    place: Place
    left: Any
    holders: int = 0


_numbers = itertools.count(1)
_values: dict[int, _Sent] = {}
_coming: dict[int, Transfer] = {}  # address of memory → what is read into it
_lock = threading.RLock()  # a ticket may be collected while this thread holds it


def place_of(name: str) -> Place:
    """The place of that name."""
    return Host() if name == "host" else Disk(store_in(name))


def _send(x: torch.Tensor, place: str) -> torch.Tensor:
    number, where = next(_numbers), place_of(place)
    _values[number] = _Sent(where, where.leave(x))
    return _ticket(number)


def _sent(x: torch.Tensor, ticket: torch.Tensor) -> torch.Tensor:
    number = int(ticket)
    _values[number].left.wait()
    return _ticket(number)


def put_away(x: torch.Tensor, place: str) -> torch.Tensor:
    """Take in a tensor that is dense in memory at once, and return a ticket. Where that fails it stays on the host."""
    number = next(_numbers)
    try:
        where = place_of(place)
        left = where.leave(x)
        left.wait()
    except OffloadError as error:
        fact, more = str(error).partition(". ")[0], format_bytes(x.nbytes)
        warn_user(f"{fact}: {more} stay in memory beyond the budget. Set TMPDIR to a folder with room.")
        where = Host()
        left = where.leave(x)
        left.wait()
    _values[number] = _Sent(where, left)
    return _ticket(number)


def take_back(ticket: torch.Tensor, x: torch.Tensor) -> None:
    """Read what ``put_away`` took in into a tensor that is dense in memory.

    Raises:
        OffloadError: it cannot be read, or is not what was written.
    """
    value = _values[int(ticket)]
    value.place.back(value.left, x).wait()


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
    value.place.drop(value.left)


def _fetch(
    ticket: torch.Tensor, place: str, size: list[int], stride: list[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    x = torch.empty_strided(size, stride, dtype=dtype, device=device)
    value = _values[int(ticket)]
    _coming[x.data_ptr()] = value.place.back(value.left, x)
    return x


def _arrived(x: torch.Tensor) -> None:
    """Wait for what ``fetch`` reads into this tensor's memory.

    Raises:
        OffloadError: it cannot be read, or is not what was written.
    """
    coming = _coming.pop(x.untyped_storage().data_ptr(), None)
    if coming is not None:
        coming.wait()


def _in_child() -> None:
    global _lock
    _lock = threading.RLock()
    for value in _values.values():
        value.place.forked(value.left)


os.register_at_fork(after_in_child=_in_child)
for _name, _function in (("send", _send), ("sent", _sent), ("fetch", _fetch), ("arrived", _arrived)):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")


def _ticket_shape(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


def _fetched_shape(_ticket: Any, _place: str, size: Any, stride: Any, dtype: Any, device: Any) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


_ON_FAKES: dict[str, Callable[..., Any]] = {
    "send": _ticket_shape,
    "sent": _ticket_shape,
    "fetch": _fetched_shape,
    "arrived": lambda _x: None,
}
for _name, _shape in _ON_FAKES.items():
    torch.library.register_fake(f"gradstow::{_name}", _shape, lib=_LIBRARY)
send = torch.ops.gradstow.send.default
sent = torch.ops.gradstow.sent.default
fetch = torch.ops.gradstow.fetch.default
arrived = torch.ops.gradstow.arrived.default
