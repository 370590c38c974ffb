"""What CUDA's allocator does, as the pickle that https://pytorch.org/memory_viz shows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gradstow._files import whole


@contextmanager
def cuda_history(path: str | os.PathLike[str]) -> Iterator[None]:
    """Record each allocation and free of the block with its stack, and write them to ``path`` at its end.

    They are written after an error too: running out of memory is what they explain best. A recording that runs already
    ends with this one. It takes several KB of the host's memory per event.

    Raises:
        GradstowError: the file cannot be written.
    """
    torch.cuda.memory._record_memory_history(clear_history=True)
    try:
        yield
    finally:
        try:
            with whole(path, "the CUDA snapshot") as file:
                torch.cuda.memory._dump_snapshot(str(file))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
