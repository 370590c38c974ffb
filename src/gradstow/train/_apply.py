"""One parameter's part of an optimizer's step, by the optimizer itself."""

from __future__ import annotations

from typing import Any

import torch

from gradstow._errors import GradstowError
from gradstow.capture._fake_memory import FakeMemory
from gradstow.capture._optimizer import example_gradient

Group = dict[str, Any]

# each parameter by its own gradient and state, with nothing counted in the group
_INDEPENDENT = {
    "torch.optim": {
        "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop",
        "Rprop", "SGD", "SparseAdam",
    },
    "timm.optim": {"Lars", "Lion"},
}  # fmt: skip
_REASONS = {
    "LBFGS": "searches along all parameters at once",
    "Lamb": "clips the norm of all gradients and counts its steps in the group",
}


def check_optimizer(optimizer: object, *, independent: bool) -> None:
    """Whether its step can be taken one parameter at a time.

    Raises:
        GradstowError: it cannot, or nobody says so.
    """
    kind = type(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise GradstowError(f"an optimizer is wanted here, not {kind.__name__}. Pass the torch.optim.Optimizer itself.")
    package = ".".join(kind.__module__.split(".")[:2])
    if kind.__name__ in _INDEPENDENT.get(package, ()) or (independent and kind.__name__ not in _REASONS):
        return
    why = _REASONS.get(kind.__name__, "is not known to update each parameter by that one's gradient and state alone")
    raise GradstowError(
        f"{kind.__name__} {why}, which applying gradients one by one needs. Use AdamW or SGD, step after the backward "
        "(optimizer_in_backward=False), or pass independent=True for an optimizer of which you know it."
    )


def check_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Step hooks would run once per parameter.

    Raises:
        GradstowError: the optimizer has some.
    """
    if any(getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post")):
        raise GradstowError(
            f"{type(optimizer).__name__} has step hooks, which would run once for each parameter. Remove them and call "
            "their functions after the step, or step after the backward: optimizer_in_backward=False."
        )


def apply_one(optimizer: torch.optim.Optimizer, group: Group, parameter: torch.nn.Parameter) -> None:
    """Step this parameter alone, with what its group says now."""
    alone = {**group, "params": [parameter]}
    if "foreach" in alone and not alone.get("fused"):
        alone["foreach"] = False
    groups = optimizer.param_groups
    optimizer.param_groups = [alone]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups


def working_bytes(optimizer: torch.optim.Optimizer, group: Group, parameter: torch.nn.Parameter) -> int:
    """Bytes that stepping this parameter takes beside its gradient and state: for a moment, and exactly."""
    try:
        return _measured(optimizer, group, parameter, "meta")
    except (NotImplementedError, RuntimeError):  # it asks for a number of the tensor, or has no such kernel
        return _measured(optimizer, group, parameter, "cpu")


def _measured(optimizer: torch.optim.Optimizer, group: Group, parameter: torch.nn.Parameter, device: str) -> int:
    twin = torch.nn.Parameter(torch.zeros_like(parameter, device=device))
    try:
        twin.grad = example_gradient(optimizer, twin)
        apply_one(optimizer, group, twin)  # makes the state
        with FakeMemory(device) as memory:
            apply_one(optimizer, group, twin)
    finally:
        optimizer.state.pop(twin, None)
    return int(memory.peak_bytes)
