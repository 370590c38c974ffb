"""Compare two training runs bit for bit: losses, gradients, buffers, parameters, random streams."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

import gradstow as gs
from models import Case

Seen = list[tuple[str, torch.Tensor | None]]
SEED = 7


def train(model: torch.nn.Module, case: Case, batch: Any, steps: int = 3, momentum: float = 0.9) -> Seen:
    """Run ``steps`` optimizer steps and return copies of everything that must be equal, in order."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02, momentum=momentum)
    seen: Seen = []
    for step in range(steps):
        torch.manual_seed(SEED + step)
        optimizer.zero_grad(set_to_none=True)
        loss = case.run(model, batch)
        loss.backward()
        seen.append((f"loss {step}", loss.detach().clone()))
        seen += state(model, f"step {step}")
        optimizer.step()
    return seen + [(f"parameter {n} at the end", p.detach().clone()) for n, p in model.named_parameters()]


def state(model: torch.nn.Module, when: str) -> Seen:
    """Gradients, buffers and random state now."""
    seen: Seen = [(f"gradient {n} in {when}", _copy(p.grad)) for n, p in model.named_parameters()]
    seen += [(f"buffer {n} after {when}", _copy(b)) for n, b in model.named_buffers()]
    seen.append((f"random state after {when}", torch.get_rng_state()))
    if torch.cuda.is_initialized():
        seen.append((f"CUDA random state after {when}", torch.cuda.get_rng_state()))
    return seen


def differences(expected: Seen, got: Seen) -> list[str]:
    """Names of what differs. Comparing nothing is a difference, and so are None and a tensor; NaN equals NaN."""
    if not any(tensor is not None for _, tensor in expected):
        return ["nothing was compared"]
    if [name for name, _ in expected] != [name for name, _ in got]:
        return ["the names differ"]
    return [name for (name, a), (_, b) in zip(expected, got, strict=True) if not same(a, b)]


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
        return False
    if a.layout is torch.sparse_coo:  # the order of what is not yet summed up is part of it
        return a.is_coalesced() == b.is_coalesced() and all(map(same, _parts(a), _parts(b)))
    if a.is_complex():
        return same(torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj()))
    if a.is_floating_point():
        nan = a.isnan()
        if not torch.equal(nan, b.isnan()):
            return False
        a, b = a.masked_fill(nan, 0), b.masked_fill(nan, 0)
    return torch.equal(a, b)


def _parts(sparse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return sparse._indices(), sparse._values()


def assert_trains_as_plain(model: torch.nn.Module, case: Case, batch: Any, twin: torch.nn.Module | None = None) -> None:
    """One step of ``model`` equals one plain step of a copy of it, taken before it (or of ``twin``)."""
    twin = plain_copy(model) if twin is None else twin
    assert differences(train(twin, case, batch, 1), train(model, case, batch, 1)) == []


def plain_copy(model: torch.nn.Module) -> torch.nn.Module:
    """A copy that is not stowed, without gradients."""
    twin = copy.deepcopy(model)
    twin._compiled_call_impl = None
    twin.zero_grad(set_to_none=True)
    return twin


def tight_budget(make_plan: Callable[[int], gs.Plan], resident: int, room: float = 1.05) -> int:
    """The smallest budget that the planner says it can meet, with ``room`` on its step peak."""
    try:
        make_plan(resident + 1)
    except gs.errors.BudgetTooSmall as error:
        return resident + int((error.minimum_bytes - resident) * room)
    raise AssertionError("a budget of one byte for the step was not refused")


def named(seen: Seen, part: str) -> Sequence[torch.Tensor | None]:
    return [tensor for name, tensor in seen if part in name]


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()
