"""A file as a place. What comes from an accelerator goes through pinned memory of the host."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from gradstow._errors import OffloadError
from gradstow.offload._host import Copy, Host, queued, side_stream
from gradstow.offload._store import Slot, Store
from gradstow.offload._transfer import Place, Transfer, as_bytes, flat


@dataclass(frozen=True, slots=True)
class Written(Transfer):
    """``copied``: its way to the host, where it comes from an accelerator; its memory is free after that."""

    writing: Future[Slot]
    copied: Copy | None

    def wait(self) -> None:
        if self.copied is None:
            result(self.writing)
        else:
            self.copied.wait()

    def wait_whole(self) -> None:
        result(self.writing)


@dataclass(frozen=True, slots=True)
class Read(Transfer):
    """The work of the file's thread, which returns the copy that it queued to an accelerator."""

    reading: Future[Copy | None]

    def wait(self) -> None:
        copied = result(self.reading)
        if copied is not None:
            copied.wait()

    def wait_whole(self) -> None:
        copied = result(self.reading)
        if copied is not None:
            copied.wait_whole()


class Disk(Place):
    """Reads and writes one after the other, in a thread of the file's."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def leave(self, x: torch.Tensor) -> Written:
        if not x.is_cuda:
            return Written(self.store.worker.submit(_write_host, self.store, [x]), None)
        copied = Host().leave(x)
        return Written(self.store.worker.submit(_write, self.store, copied), copied)

    def back(self, left: Written, x: torch.Tensor) -> Read:
        if not x.is_cuda:
            return Read(self.store.worker.submit(_read, self.store, left, [x]))
        ready = torch.cuda.current_stream(x.device).record_event()
        return Read(self.store.worker.submit(_read_and_copy, self.store, left, [x], ready))

    def drop(self, left: Written) -> None:
        free = self.store.free
        left.writing.add_done_callback(lambda done: None if done.exception() else free(done.result()))

    def forked(self, left: Written) -> None:
        if not left.writing.done():
            left.writing.set_exception(
                OffloadError("a value was on its way to the offload file when the process forked. Fork between steps.")
            )


# The worker's thread gets tensors in a list that it empties: what it is called with it holds until after it has said
# that it is done, and their memory must be given up by then.


def _write_host(store: Store, given: list[torch.Tensor]) -> Slot:
    return store.write(as_bytes(given.pop()))


def _write(store: Store, copied: Copy) -> Slot:
    if copied.done is not None:
        copied.done.synchronize()
    return store.write(as_bytes(copied.kept))


def _read(store: Store, left: Written, given: list[torch.Tensor]) -> None:
    store.read(left.writing.result(), as_bytes(given.pop()))


def _read_and_copy(store: Store, left: Written, given: list[torch.Tensor], ready: Any) -> Copy:
    """``ready``: whoever used this memory before is done."""
    x = given.pop()
    kept = torch.empty(x.numel(), dtype=x.dtype, pin_memory=True)
    store.read(left.writing.result(), as_bytes(kept))
    with torch.cuda.stream(side_stream(x.device)):
        torch.cuda.current_stream().wait_event(ready)
        return queued(flat(x), kept, kept)


def result(work: Future[Any]) -> Any:
    """What it returned. Its error anew: the worker's own would keep alive all that it is raised through."""
    error = work.exception()
    if error is not None:
        raise OffloadError(str(error)) if isinstance(error, OffloadError) else error
    return work.result()
