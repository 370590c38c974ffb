"""What a model is to a plan: its device, the layouts of its weights, what is resident."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from gradstow._errors import CaptureError
from gradstow.capture._tree import storage_key, tensors
from gradstow.ir import Resident


def device_of(model: torch.nn.Module) -> str:
    """The one kind of device that the parameters are on.

    Raises:
        CaptureError: no trainable parameter, or parameters on several kinds of device.
    """
    devices = {p.device.type for p in model.parameters() if p.requires_grad}
    if not devices:
        raise CaptureError(
            f"{type(model).__name__} has no trainable parameters, so there is no backward to plan. "
            "Set requires_grad_(True) on what is to be trained."
        )
    if len(devices) > 1:
        raise CaptureError(f"the parameters are on several devices ({', '.join(sorted(devices))}). Use one device.")
    (device,) = devices
    if device not in ("cpu", "cuda"):
        raise CaptureError(f"the parameters are on {device}. gradstow trains on cpu and cuda: move the model there.")
    return device


def weights_signature(model: torch.nn.Module) -> str:
    """A short hash of the names, shapes and dtypes of a model's parameters and buffers."""
    items = [*model.named_parameters(), *model.named_buffers()]
    text = ";".join(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in items)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def existing_gradients(model: torch.nn.Module) -> frozenset[int]:
    """Positions, among the trainable parameters, of those that have a ``.grad``."""
    trained = (p for p in model.parameters() if p.requires_grad)
    return frozenset(i for i, p in enumerate(trained) if p.grad is not None)


def stand_in(parameter: torch.nn.Parameter, working_bytes: int) -> torch.Tensor:
    """A ``.grad`` without memory, which says that the real one is applied and freed as soon as it is complete.

    ``working_bytes``: what applying it takes beside it.
    """
    zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
    zero.gradstow_applies = working_bytes  # type: ignore[attr-defined]
    return zero


def applied_gradients(model: torch.nn.Module) -> dict[int, int]:
    """Positions, among the trainable parameters, of those with a stand-in → what applying their gradients takes."""
    trained = (p for p in model.parameters() if p.requires_grad)
    found = ((i, getattr(p.grad, "gradstow_applies", -1)) for i, p in enumerate(trained))
    return {i: nbytes for i, nbytes in found if nbytes >= 0}


def resident_items(model: torch.nn.Module, batch: Any, device: str) -> list[tuple[str, str, int]]:
    """(part, name, bytes) of what the model and the batch hold, each storage once, under its first name."""
    seen: set[int] = set()
    found: list[tuple[str, str, int]] = []

    def count(part: str, items: Iterable[tuple[str, Any]]) -> None:
        for name, tensor in items:
            new = [t for t in _strided(tensor) if t.device.type == device and storage_key(t) not in seen]
            seen.update(storage_key(t) for t in new)
            found.append((part, name, sum({storage_key(t): t.untyped_storage().nbytes() for t in new}.values())))

    count("parameters", model.named_parameters())
    count("buffers", model.named_buffers())
    count("gradients", ((name, p.grad) for name, p in model.named_parameters()))
    count("batch", ((f"batch tensor {i}", t) for i, t in enumerate(tensors(batch))))
    return [item for item in found if item[2]]


def resident_bytes(model: torch.nn.Module, batch: Any, device: str) -> Resident:
    """The same by parts."""
    parts = Counter[str]()
    for part, _, nbytes in resident_items(model, batch, device):
        parts[part] += nbytes
    return Resident(**parts)


def _strided(item: Any) -> tuple[torch.Tensor, ...]:
    """The dense tensors that a tensor consists of."""
    if not isinstance(item, torch.Tensor):
        return ()
    if item.layout is torch.sparse_coo:
        return item._indices(), item._values()
    return (item,) if item.layout is torch.strided else ()
