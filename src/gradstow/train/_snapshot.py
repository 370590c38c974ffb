"""What a window that breaks off leaves behind: nothing. Without a second copy of the weights.

Only ``optimizer.step`` writes weights, so before it random streams and buffers are all that has to be put back, and
gradients to be dropped. ``optimizer.step`` itself is undone where it had written nothing yet (the usual case when its
state does not fit), and is not interrupted by Ctrl-C.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch

from gradstow.execute import inner_error
from gradstow.train._randomness import Randomness, cuda_devices

_SMALL = 1 << 20  # bytes; larger buffers are copied only when a window was seen to write them


class Buffers:
    """Copies of the buffers that forwards write, such as BatchNorm's statistics; kept from window to window.

    Version counters do not tell what was written: neither ``batch_norm`` nor a write through ``.data`` counts. So all
    small ones are copied, except masks; large ones when their counter has moved in an earlier window.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._stores = [(name, module._buffers) for name, module in model.named_modules() if module._buffers]
        self._copies: dict[tuple[str, str], torch.Tensor] = {}
        self._before: list[tuple[dict[str, Any], tuple[str, str], torch.Tensor | None, int]] = []

    @torch.no_grad()
    def save(self) -> None:
        """Copy what the next window may write."""
        last = {entry[1]: entry[2:] for entry in self._before}
        copies, self._copies, self._before = self._copies, {}, []
        batches: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for module, store in self._stores:
            for name, tensor in store.items():
                key, version = (module, name), _version(tensor)
                self._before.append((store, key, tensor, version))
                if tensor is None or not (key in copies or _is_copied(tensor, last.get(key), version)):
                    continue
                copy = copies.get(key)
                if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                    self._copies[key] = tensor.clone()
                else:
                    self._copies[key] = copy
                    targets, sources = batches.setdefault((tensor.device, tensor.dtype), ([], []))
                    targets.append(copy)
                    sources.append(tensor)
        for targets, sources in batches.values():
            torch._foreach_copy_(targets, sources)

    @torch.no_grad()
    def restore(self) -> list[str]:
        """Put everything back; returns the names of what was written and had not been copied."""
        lost = []
        for store, key, tensor, version in self._before:
            store[key[1]] = tensor
            if key in self._copies:
                assert tensor is not None, "only tensors are copied"
                tensor.copy_(self._copies[key])
            elif _version(tensor) != version:
                lost.append(".".join(part for part in key if part))
        return lost


def _is_copied(tensor: torch.Tensor, last: tuple[torch.Tensor | None, int] | None, version: int) -> bool:
    moved = last is not None and (last[0] is not tensor or last[1] != version)
    return moved or (tensor.nbytes <= _SMALL and tensor.dtype is not torch.bool)


class Snapshot:
    """The state before a window, as far as anything but ``optimizer.step`` changes it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._devices = cuda_devices(model)
        self._buffers = Buffers(model)
        self._randomness: Randomness | None = None

    def save(self) -> None:
        self._buffers.save()
        self._randomness = Randomness.now(self._devices)

    def restore(self, error: BaseException) -> None:
        """Put it back, with a note on the error where a buffer could not be."""
        assert self._randomness is not None, "saved first"
        lost = self._buffers.restore()
        self._randomness.restore()
        if lost:
            error.add_note(
                f"gradstow: the buffers {', '.join(lost[:5])} were written before this error and are not put back: "
                f"they take more than {_SMALL} bytes, and no window had written them before. The next ones are copied."
            )


class OptimizerSteps:
    """Undoes optimizer steps that had written no tensor yet. Copies no tensor: version counters tell.

    What the state of a parameter is (its numbers, and which tensors) is remembered, and so are the group's settings.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._states = [{p: dict(entries) for p, entries in o.state.items()} for o in optimizers]
        self._groups = [[dict(group) for group in o.param_groups] for o in optimizers]
        tensors = [p for groups in self._groups for group in groups for p in group["params"]]
        tensors += [
            value
            for states in self._states
            for entries in states.values()
            for value in entries.values()
            if isinstance(value, torch.Tensor)
        ]
        self._versions = [(tensor, _version(tensor)) for tensor in tensors]

    def undo(self) -> bool:
        """Whether everything is as before; False where that is not known.

        Fused kernels count no versions, and optimizers outside of torch may write through ``.data``, which does not.
        """
        own = all(type(o).__module__.startswith("torch.optim") for o in self._optimizers)
        fused = any(group.get("fused") for groups in self._groups for group in groups)
        if not own or fused or any(_version(tensor) != version for tensor, version in self._versions):
            return False
        for optimizer, states, groups in zip(self._optimizers, self._states, self._groups, strict=True):
            optimizer.state.clear()
            optimizer.state.update(states)
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                group.clear()
                group.update(before)
        return True


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C inside waits until the end of the block: half an optimizer step cannot be undone.

    Only in the main thread and with Python's own handler; any other handler is left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if came:
            signal.default_int_handler(*came[0])


def out_of_memory(error: BaseException) -> bool:
    """Whether the allocator of the device or of the machine refused."""
    cause = inner_error(error)
    if isinstance(cause, (torch.OutOfMemoryError, MemoryError)):
        return True
    words = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory", "ALLOC_FAILED")
    return isinstance(cause, RuntimeError) and any(text in str(cause) for text in words)


def _version(tensor: torch.Tensor | None) -> int:
    return -1 if tensor is None or tensor.is_inference() else tensor._version
