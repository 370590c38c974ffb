"""The public functions. This file and ``_planning``, ``_run``, ``_stow``, ``_verify`` alone chain the rooms."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch

from gradstow._errors import CaptureError, GradstowError, PolicyError
from gradstow._frontier import Frontier
from gradstow._plan import Plan
from gradstow._planning import capture_step, plan_captured, plan_frontier, plan_step, users_errors
from gradstow._profile import Profile, measure_steps, named_weights, with_first_names
from gradstow._stow import MAX_PLANS, check_alone, plain, stow_model, unstow_model
from gradstow._verify import Proof, Verification
from gradstow._wanted import ACTIONS, LossyLike, PolicyLike, Progress, Wanted
from gradstow.capture import Captured, Step, cuda_history, device_of
from gradstow.cost import find_profile
from gradstow.planner import Effort

Model = TypeVar("Model", bound=torch.nn.Module)
Loss = Callable[[Any, Any], torch.Tensor]
Forward = Callable[[torch.nn.Module, Any], Any]


def stow(
    model: Model,
    budget: int | str | None = None,
    *,
    plan: Plan | Sequence[Plan] | None = None,
    policy: PolicyLike = "auto",
    optimizer: torch.optim.Optimizer | None = None,
    progress: Progress | None = None,
    max_plans: int = MAX_PLANS,
    actions: Sequence[str] = ACTIONS,
    lossy: LossyLike = None,
    offload: str | None = None,
    codegen: str = "eager",
) -> Model:
    """Train ``model`` inside a memory budget, with plain PyTorch's own numbers.

    Returns the same module object, with the same type and state_dict keys. The first training forward
    rehearses the step on fake tensors, plans it and refuses a budget that cannot be met before any real op
    has run; in eval mode and under ``no_grad`` the model runs as plain PyTorch. A copy or a pickle of a stowed
    model is a plain model.

    Args:
        budget: all live bytes of training on the model's device: ``int`` bytes, ``"6GiB"``, ``"60%"`` of plain
            PyTorch's step peak, or ``"auto"`` for nine tenths of the free memory.
        plan: a plan made by ``gs.plan``, instead of a budget; or several, for batches of several shapes. Other batches
            are planned as the first one was.
        policy: ``"auto"``, ``"store-all"``, ``"recompute-all"``, ``"sqrt"``, ``"selective"`` (stores convolutions,
            matrix products and attention), or rules that bind the planner, such as
            ``{"relu": "compress", "layer3.*": "store", "layer1.*": "int4"}``; see ``gs.Policy``.
        optimizer: counts the optimizer's state and its step as well.
        progress: called with (stage, done, total) while planning.
        max_plans: plans kept for different batch layouts and modes; the least recently used one leaves.
        actions: what the planner may use, for comparisons: some of ``("store", "recompute", "compress")``.
        lossy: allows a code that is not exact, for activations that would not fit otherwise: ``"bf16"``, ``"fp8"``,
            ``"int8"``, ``"int4"``, ``"int2"``, or the largest error as a part of the range of 128 neighbours, such as
            ``0.01``. Only floats that ops of the forward make, never parameters, inputs, indices, masks or saved
            statistics. Gradients are then near plain PyTorch's, not equal; the user's random streams are left alone.
        offload: allows values to wait for the backward elsewhere, exactly: ``"host"`` (pinned memory of the machine,
            for values of an accelerator), ``"disk"`` (the folder for temporary files) or ``"disk:/path/to/folder"``, in
            a file without a name that is gone when the process ends.
        codegen: ``"eager"`` runs PyTorch's own kernels: equal numbers. ``"inductor"`` compiles the planned graphs as
            ``torch.compile`` does, fused and faster: numbers as near as its are, random ones plain PyTorch's own. The
            memory of the compiled code is found before it runs. Only stores and recomputes; a percentage is of what the
            compiled step needs where everything is stored.

    Memory: the measured peak stays at or under the budget. The output is taken to be held by the loop during
    the backward; where the loss is computed outside of the model, six times the outputs are reserved for it.

    Raises:
        BudgetError, BudgetTooSmall, CaptureError, OffloadError, StalePlan, PolicyError: here or in a forward; after any
            of them the model runs as plain PyTorch. An OffloadError in a backward leaves it stowed.
    """
    wanted = Wanted.of(budget, policy, actions, lossy, offload, progress=progress, codegen=codegen)
    stow_model(model, wanted, plan, optimizer, max_plans)
    return model


def unstow(model: Model) -> Model:
    """Undo ``stow``: the model runs as plain PyTorch again.

    Raises:
        GradstowError: the model is not stowed.
    """
    unstow_model(model)
    return model


def plan(
    model: torch.nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    budget: int | str | None = None,
    policy: PolicyLike = "auto",
    effort: str | Effort = "normal",
    codegen: str = "eager",
    device: str | None = None,
    forward: Forward | None = None,
    keep_output: bool = True,
    progress: Progress | None = None,
    actions: Sequence[str] = ACTIONS,
    lossy: LossyLike = None,
    offload: str | None = None,
) -> Plan:
    """Plan one training step without running it: fake tensors only, plus the timing of one op at a time.

    Args:
        batch: what a loader yields: the model is called as ``model(**batch)`` for a mapping,
            ``model(batch[0])`` for an (input, target) pair, ``model(batch)`` otherwise.
        loss: ``loss(output, batch)``; None where the output is the loss or has a ``.loss``.
        optimizer: adds its state to what is resident and its step to the timeline.
        budget: as for ``stow``; None plans without a limit.
        policy: as for ``stow``.
        effort: ``"quick"`` (no solver, no proven bound), ``"normal"`` or ``"thorough"``; work is counted, not timed, so
            that the same input gives the same plan. Ctrl-C while the solver runs gives the best plan so far.
        device: a profile such as ``"cuda:h100"``, to plan for a device that is not here: op times then come from its
            data sheet, and working memory of ops counts as nothing.
        forward: ``forward(model, batch)`` in place of the rule for calling the model.
        keep_output: whether your loop still holds the model's output while the backward runs.
        codegen: as for ``stow``.
        progress: called with (stage, done, total).
        actions, lossy, offload: as for ``stow``.

    Returns:
        A plan: print it, save it, hand it to ``stow(model, plan=plan)``.

    Raises:
        BudgetError, BudgetTooSmall, CaptureError, PolicyError.
    """
    search = replace(Effort.of(effort), interruptible=True)
    profile = None if device is None else find_profile(device)
    wanted = Wanted.of(budget, policy, actions, lossy, offload, search, profile, progress, codegen)
    step = make_step(model, batch, loss, optimizer, forward, keep_output)
    with users_errors():
        return plan_step(model, step, wanted)


def frontier(
    model: torch.nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    points: int = 20,
    forward: Forward | None = None,
    keep_output: bool = True,
    progress: Progress | None = None,
    policy: PolicyLike = "auto",
    actions: Sequence[str] = ACTIONS,
    lossy: LossyLike = None,
    offload: str | None = None,
) -> Frontier:
    """Time against peak for one training step: plans from everything stored down to the smallest peak.

    Args: as for ``plan``; ``points`` is the number of budgets, evenly apart in bytes. ``policy`` may hold rules, and no
    name but "auto". ``lossy`` and ``offload`` take several times as long to plan.

    Returns:
        A frontier: print it, draw it, hand one of its plans to ``stow``. Seconds are predicted, and each point
        has a proven lower bound beside it.

    Raises:
        CaptureError, PolicyError, OffloadError.
    """
    wanted = Wanted.of(None, policy, actions, lossy, offload, progress=progress)
    _check_frontier(wanted, points)
    with users_errors():
        captured = capture_step(model, make_step(model, batch, loss, optimizer, forward, keep_output), wanted)
        return _frontier_of(captured, wanted, points)


def _check_frontier(wanted: Wanted, points: int) -> None:
    if points < 2:
        raise GradstowError(f"a frontier needs at least two points, not points={points}.")
    if wanted.policy.name != "auto":
        raise PolicyError(f"the policy {wanted.policy.name!r} is one plan, not a frontier. See gs.plan, or give rules.")


def _frontier_of(captured: Captured, wanted: Wanted, points: int) -> Frontier:
    plans, proven = plan_frontier(captured, wanted, points)
    return Frontier(tuple(plans), proven)


def profile(
    model: torch.nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    budget: int | str | None = None,
    measure: bool = False,
    points: int = 0,
    policy: PolicyLike = "auto",
    effort: str | Effort = "normal",
    device: str | None = None,
    forward: Forward | None = None,
    keep_output: bool = True,
    progress: Progress | None = None,
    actions: Sequence[str] = ACTIONS,
    lossy: LossyLike = None,
    offload: str | None = None,
    cuda_snapshot: str | os.PathLike[str] | None = None,
) -> Profile:
    """Where the memory of one training step goes: at its peak and over time, by part, module, op, line and tensor.

    Nothing is allocated but one op's tensors at a time, unless ``measure`` asks for real steps.

    Args: as for ``plan``.
        budget: shows the step before and after planning; None shows plain PyTorch's alone.
        measure: also run two steps of a copy of the model, plain and with a budget planned, and put their measured
            peaks, and what autograd really saves per module, beside what is predicted.
        points: also plan for this many budgets, for the page's frontier; 0 for none.
        cuda_snapshot: a file for what CUDA's allocator does while ``measure`` runs the steps, warm-up included: the
            pickle that https://pytorch.org/memory_viz shows.

    Returns:
        A profile: print it, or write it with ``save_html``, ``save_trace``, ``save_picture``.

    Raises:
        BudgetError, BudgetTooSmall, CaptureError, PolicyError.
        GradstowError: ``cuda_snapshot`` without ``measure``, of a model that is not on CUDA, or that cannot be written.
    """
    if measure and device is not None:
        raise GradstowError(f"steps for {device!r} cannot be measured here. Leave away measure= or device=.")
    search = replace(Effort.of(effort), interruptible=True)
    place = None if device is None else find_profile(device)
    wanted = replace(Wanted.of(budget, policy, actions, lossy, offload, search, place, progress), cached=not measure)
    if points:
        _check_frontier(wanted, points)
    if cuda_snapshot is not None:
        _check_cuda(model, measure)
    with users_errors():
        captured = capture_step(model, make_step(model, batch, loss, optimizer, forward, keep_output), wanted)
        made = plan_captured(captured, wanted)
        curve = _frontier_of(captured, wanted.limited(None), points) if points else None
    weights, measured = named_weights(model, batch), {}
    if measure:
        call = forward or default_forward(batch)
        with nullcontext() if cuda_snapshot is None else cuda_history(cuda_snapshot):
            measured = measure_steps(made, model, batch, call, loss, optimizer, keep_output)
    return Profile(with_first_names(made, model), weights, measured, curve)


def _check_cuda(model: torch.nn.Module, measure: bool) -> None:
    """Refuse a snapshot that would hold nothing."""
    if not measure:
        raise GradstowError("cuda_snapshot= records real steps, and none are asked for. Add measure=True.")
    if device_of(model) != "cuda":
        raise GradstowError(
            "cuda_snapshot= records CUDA's memory, and the model is not there. Move model and batch to CUDA, or leave "
            "cuda_snapshot= away."
        )


def verify(
    model: torch.nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    budget: int | str | None = None,
    plan: Plan | None = None,
    policy: PolicyLike = "auto",
    steps: int = 3,
    forward: Forward | None = None,
    rounds: int = 5,
    progress: Progress | None = None,
    actions: Sequence[str] = ACTIONS,
    lossy: LossyLike = None,
    offload: str | None = None,
) -> Verification:
    """Prove on copies that the planned step equals plain PyTorch, and measure both.

    Runs ``steps`` optimizer steps plain twice and planned once, and compares losses, gradients, buffers,
    parameters and RNG states bit for bit; then measures the step peaks and ``rounds`` interleaved times.

    Args: as for ``plan``; ``optimizer`` None uses SGD with momentum on the copies.

    Memory: about three copies of the model and its optimizer, and one plain step at a time.

    Raises:
        BudgetError, BudgetTooSmall, CaptureError, StalePlan, PolicyError.
    """
    made = plan
    wanted = Wanted.of(budget, policy, actions, lossy, offload, progress=progress)
    check_alone(plan, wanted)
    if made is None:
        step = make_step(model, batch, loss, optimizer, forward, keep_output=False)
        with users_errors():
            made = plan_step(model, step, wanted)
    call = forward or default_forward(batch)
    return Proof(model, batch, call, loss, optimizer, steps, progress).check(made, rounds)


def make_step(
    model: torch.nn.Module,
    batch: Any,
    loss: Loss | None,
    optimizer: torch.optim.Optimizer | None,
    forward: Forward | None,
    keep_output: bool,
) -> Step:
    if not isinstance(model, torch.nn.Module):
        raise CaptureError(f"the model is a {type(model).__name__}, not a torch.nn.Module.")
    call = forward or default_forward(batch)
    return Step(call, batch, batch, loss, optimizer, keep_output)


def default_forward(batch: Any) -> Forward:
    if isinstance(batch, Mapping):
        return lambda model, item: model(**item)
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return lambda model, item: model(item[0])
    return lambda model, item: model(item)


__all__ = ["Frontier", "Profile", "Verification", "frontier", "plain", "plan", "profile", "stow", "unstow", "verify"]
