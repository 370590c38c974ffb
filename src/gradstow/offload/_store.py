"""One file without a name, and slots in it: what is written once and read as often as wanted."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gradstow._errors import OffloadError
from gradstow._units import format_bytes
from gradstow.offload._place import folder_of, open_unnamed

_ALIGNED = 4096  # slots start at pages


@dataclass(frozen=True, slots=True)
class Slot:
    """A part of the file, and the checksum of what was written there."""

    start: int
    nbytes: int
    checksum: int = 0


class Store:
    """Slots in a file. Safe to use from several threads.

    The file has no name: nobody else can remove it or write to it, and it is gone when the process ends, also after
    SIGKILL. Freed slots are used again, so that the file is as long as what was in it at once.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.file = open_unnamed(folder)
        except OSError as error:
            raise OffloadError(
                f"no file for offloaded values can be made in {folder} ({error.strerror}). Make that folder, or name "
                "another: offload='disk:/path'."
            ) from error
        self.length = 0
        self._returned: deque[Slot] = deque()
        self._free: list[tuple[int, int]] = []  # (start, length), sorted, no two of them touching
        self.begin_in_this_process()
        _stores.add(self)

    def begin_in_this_process(self) -> None:
        """A thread and a lock, which a forked child does not get."""
        self.worker = ThreadPoolExecutor(1, "gradstow-offload")  # one after the other, as a disk likes it
        self._lock = threading.Lock()

    def __del__(self) -> None:
        if hasattr(self, "worker"):
            self.worker.shutdown(wait=False)
            os.close(self.file)

    @property
    def used_bytes(self) -> int:
        """Bytes in slots."""
        with self._lock:
            self._collect()
            return self.length - sum(length for _, length in self._free)

    def write(self, data: np.ndarray) -> Slot:
        """Write bytes into a slot of their own.

        Raises:
            OffloadError: no room, or the file cannot be written.
        """
        view = _view(data)
        start = self._take(_rounded(len(view)))
        try:
            with self._named("written", len(view)):
                done = 0
                while done < len(view):
                    done += os.pwrite(self.file, view[done:], start + done)
        except OffloadError:
            self.free(Slot(start, len(view)))
            raise
        return Slot(start, len(view), checksum(data))

    def read(self, slot: Slot, data: np.ndarray) -> None:
        """Read a slot into bytes of its size.

        Raises:
            OffloadError: the file cannot be read, or holds something else than what was written.
        """
        view, done = _view(data), 0
        assert len(view) == slot.nbytes, "a slot is read into as many bytes as were written"
        with self._named("read", slot.nbytes):
            while done < slot.nbytes:
                count = os.preadv(self.file, [view[done:]], slot.start + done)
                if not count:
                    break
                done += count
        if done < slot.nbytes or checksum(data) != slot.checksum:
            what = f"ends {format_bytes(slot.nbytes - done)} too early" if done < slot.nbytes else "holds other bytes"
            raise OffloadError(
                f"the offload file in {self.folder} {what} than were written there: something outside of this process "
                "changed it, or the disk fails. The step cannot go on. Train with another folder: offload='disk:/path'."
            )

    def free(self, slot: Slot) -> None:
        """Give a slot back. Only notes it: it is called wherever a ticket is collected, with any lock held."""
        self._returned.append(slot)

    def _collect(self) -> None:
        """Join what was given back. Called with the lock held."""
        while self._returned:
            slot = self._returned.popleft()
            start, length = slot.start, _rounded(slot.nbytes)
            kept = []
            for other, size in self._free:
                if other + size == start:
                    start, length = other, length + size
                elif start + length == other:
                    length += size
                else:
                    kept.append((other, size))
            self._free = sorted([*kept, (start, length)])

    def _take(self, length: int) -> int:
        with self._lock:
            self._collect()
            fitting = [(size, start) for start, size in self._free if size >= length]
            if not fitting:
                start, self.length = self.length, self.length + length
                return start
            size, start = min(fitting)
            self._free.remove((start, size))
            if size > length:
                self._free = sorted([*self._free, (start + length, size - length)])
            return start

    @contextmanager
    def _named(self, verb: str, nbytes: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OffloadError(
                f"{format_bytes(nbytes)} of the offload file in {self.folder} could not be {verb} ({error.strerror}). "
                "Free some room there, name another folder: offload='disk:/path', or give a larger budget."
            ) from error


def _view(data: np.ndarray) -> memoryview:
    return memoryview(data).cast("B")  # type: ignore[arg-type]


def checksum(data: np.ndarray) -> int:
    """Of the bytes as 64-bit numbers, weighted by their place in pages, so that pages in another order show."""
    flat = data.view(np.uint8).reshape(-1)
    whole = len(flat) // 8 * 8
    numbers = flat[:whole].view(np.uint64)
    pages = len(numbers) // 512
    sums = numbers[: pages * 512].reshape(pages, 512).sum(axis=1, dtype=np.uint64)
    rest = int(numbers[pages * 512 :].sum(dtype=np.uint64)) * (pages + 1) + int(flat[whole:].sum(dtype=np.uint64))
    weights = np.arange(1, pages + 1, dtype=np.uint64)
    return (int((sums * weights).sum(dtype=np.uint64)) + rest) & ((1 << 64) - 1)


def _rounded(nbytes: int) -> int:
    return max(-(-nbytes // _ALIGNED) * _ALIGNED, _ALIGNED)


@functools.cache
def store_in(place: str) -> Store:
    """The store of a place in this process; a forked child makes its own."""
    return Store(folder_of(place))


_stores: weakref.WeakSet[Store] = weakref.WeakSet()


def _in_child() -> None:
    """What the parent sent can be read; what comes next goes into a file of this process's own."""
    store_in.cache_clear()
    for store in list(_stores):
        store.begin_in_this_process()


os.register_at_fork(after_in_child=_in_child)
