"""Host memory for an accelerator's values: pinned, and copied on a stream of its own, beside the ops."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from gradstow.offload._transfer import Place, Transfer, flat


@dataclass(frozen=True, slots=True)
class Copy(Transfer):
    """A copy that was queued. ``kept`` is the tensor in host memory; on a CPU it is there at once."""

    kept: torch.Tensor
    done: torch.cuda.Event | None

    def wait(self) -> None:
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)

    def wait_whole(self) -> None:
        if self.done is not None:
            self.done.synchronize()


class Host(Place):
    """Copies wait for the ops that made the tensor, or that last used the memory which it comes back to."""

    def leave(self, x: torch.Tensor) -> Copy:
        kept = torch.empty(x.numel(), dtype=x.dtype, pin_memory=x.is_cuda)
        return queued(kept, flat(x), kept)

    def back(self, left: Copy, x: torch.Tensor) -> Copy:
        return queued(flat(x), left.kept, left.kept)

    def drop(self, left: Copy) -> None:
        """Nothing to do: torch gives pinned memory to others only once the copies that use it are done."""

    def forked(self, left: Copy) -> None:
        """It is in this process's copy of the memory."""


def queued(target: torch.Tensor, source: torch.Tensor, kept: torch.Tensor) -> Copy:
    """Copy between a device and the host behind the ops of this thread so far, beside those that come next."""
    device = target.device if target.is_cuda else source.device
    if device.type != "cuda":
        target.copy_(source)
        return Copy(kept, None)
    stream = side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        return Copy(kept, stream.record_event())


@functools.cache
def side_stream(device: torch.device) -> Any:
    """One for both directions: the plan's clock counts transfers one after the other."""
    return torch.cuda.Stream(device)
