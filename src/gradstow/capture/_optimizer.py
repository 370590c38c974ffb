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
    seen: dict[int, int] = {}
    for state in twin.state.values():
        for item in tensors(state):
            if item.device.type == device:
                seen[storage_key(item)] = item.untyped_storage().nbytes()
    return sum(seen.values()), memory.peak_bytes


def example_gradient(optimizer: object, parameter: torch.Tensor) -> torch.Tensor:
    """A gradient of zeros in the layout that the optimizer takes: with all rows, which is the most, for SparseAdam."""
    values = torch.zeros_like(parameter, requires_grad=False)
    if not isinstance(optimizer, torch.optim.SparseAdam):
        return values
    rows = torch.arange(len(parameter), device=parameter.device).unsqueeze(0)
    return torch.sparse_coo_tensor(rows, values, parameter.shape, check_invariants=False)
