"""What an optimizer's step takes, seen on fake tensors."""

from __future__ import annotations

from typing import Any

import torch

from gradstow.capture._fake_memory import FakeMemory
from gradstow.capture._fakes import Fakes
from gradstow.capture._tree import storage_key, tensors


def rehearse_optimizer(fakes: Fakes, optimizer: Any, device: str, *, make_gradients: bool = False) -> tuple[int, int]:
    """(bytes of the optimizer's state, working memory of its step above that)."""
    if optimizer is None:
        return 0, 0
    twin = fakes.optimizer(optimizer)
    if make_gradients:
        for one in getattr(twin, "optimizers", (twin,)):  # several that are stepped as one
            for parameter in (p for group in one.param_groups for p in group["params"]):
                parameter.grad = example_gradient(one, parameter) if parameter.requires_grad else None
    twin.step()  # makes the state
    with FakeMemory(device) as memory:
        twin.step()
    return state_bytes(twin, device), memory.peak_bytes


def state_bytes(optimizer: Any, device: str) -> int:
    """Bytes of an optimizer's state on a kind of device, each storage once."""
    held = [item for state in optimizer.state.values() for item in tensors(state)]
    return sum({storage_key(t): t.untyped_storage().nbytes() for t in held if t.device.type == device}.values())


def example_gradient(optimizer: object, parameter: torch.Tensor) -> torch.Tensor:
    """A gradient of zeros in the layout that the optimizer takes: with all rows, which is the most, for SparseAdam."""
    values = torch.zeros_like(parameter, requires_grad=False)
    if not isinstance(optimizer, torch.optim.SparseAdam):
        return values
    rows = torch.arange(len(parameter), device=parameter.device).unsqueeze(0)
    return torch.sparse_coo_tensor(rows, values, parameter.shape, check_invariants=False)
