"""``gs.profile``: where the memory of a training step goes, predicted without running it, and measured."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from gradstow._files import write_text
from gradstow._frontier import Frontier
from gradstow._plan import Plan
from gradstow._stow import stow_model
from gradstow._verify import Call, Loss, Trainee, seed, twins
from gradstow._wanted import Wanted
from gradstow.capture import device_of, resident_items, same_randomness, state_bytes, tensors
from gradstow.cost import measure_peak, saved_by_modules
from gradstow.ir import PlanData
from gradstow.report import (
    Curve,
    Held,
    Measured,
    Snapshot,
    Story,
    memory_picture,
    profile_json,
    profile_page,
    profile_text,
    trace_json,
)


@dataclass(frozen=True)
class Profile:
    """Where the memory of one training step goes. ``print(profile)`` shows its tables; all bytes.

    Attributes:
        plan: the step, captured and planned; without a budget everything is stored.
        weights: the model's parameters, buffers and gradients, and the batch, by name.
        measured: what real steps took, as "plain" and, with a budget, "planned"; empty without ``measure=True``.
        frontier: time against memory, where points were asked for.
    """

    plan: Plan
    weights: tuple[Held, ...]
    measured: Mapping[str, Measured] = field(default_factory=dict)
    frontier: Frontier | None = None

    @cached_property
    def plain(self) -> Snapshot:
        """What is alive at the peak of plain PyTorch's step. Its ``rows`` add up to its ``peak_bytes``."""
        return Story(self.plan, plain=True, weights=self.weights).peak()

    @cached_property
    def planned(self) -> Snapshot:
        """What is alive at the peak of the planned step."""
        return Story(self.plan, plain=False, weights=self.weights).peak()

    def to_json(self) -> dict[str, Any]:
        """Everything that the page shows."""
        plans: Sequence[PlanData] = () if self.frontier is None else self.frontier.plans
        proven = 0 if self.frontier is None else self.frontier.proven_step_peak_bytes
        return profile_json(self.plan, self.weights, self.measured, plans, proven)

    def save_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one page that works without a network: timelines, values, modules, frontier, certificate.

        Raises:
            GradstowError: the file cannot be written.
        """
        return write_text(path, profile_page(self.to_json()), "the page")

    def save_trace(self, path: str | os.PathLike[str]) -> Path:
        """Write the predicted steps for Perfetto or chrome://tracing: ops, transfers, memory by parts.

        Raises:
            GradstowError: the file cannot be written.
        """
        return write_text(path, json.dumps(trace_json(self.to_json())), "the trace")

    def save_picture(self, path: str | os.PathLike[str]) -> Path:
        """Draw live memory over the step, plain and planned, to a PNG, SVG or PDF file.

        Raises:
            GradstowError: matplotlib is not installed, or the file cannot be written.
        """
        limited = bool(self.plan.budget)
        runs = {"plain PyTorch": True, "planned": False} if limited else {"plain PyTorch": True}
        curves = [Curve(name, Story(self.plan, plain=plain).curve()) for name, plain in runs.items()]
        title = f"{self.plan.graph.model}: one training step, predicted"
        return memory_picture(path, curves, budget_bytes=self.plan.step_budget_bytes, title=title)

    def text(self, *, depth: int = 3, limit: int = 10) -> str:
        """The tables: ``depth`` of the tree of modules, and at most ``limit`` lines of each other table."""
        return profile_text(self.plan, self.weights, self.measured, depth=depth, limit=limit)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<Profile of {self.plan.graph.model}, peak {self.plain.peak_bytes} bytes at {self.plain.at}>"


def named_weights(model: torch.nn.Module, batch: Any) -> tuple[Held, ...]:
    """What is alive before the step, by its names."""
    return tuple(
        Held(name, part, nbytes, module="" if part == "batch" else name.rpartition(".")[0])
        for part, name, nbytes in resident_items(model, batch, device_of(model))
    )


def with_first_names(plan: Plan, model: torch.nn.Module) -> Plan:
    """The plan with each module under the name of ``named_modules``, the first; the capture may find it by another."""
    first = {id(module): name for name, module in model.named_modules()}

    def name(path: str) -> str:
        try:
            return first.get(id(model.get_submodule(path)), path)
        except AttributeError:  # a name of the tracer's own
            return path

    regions = tuple(
        replace(region, ops=tuple(replace(op, module=name(op.module)) for op in region.ops))
        for region in plan.graph.regions
    )
    return replace(plan, graph=replace(plan.graph, regions=regions))


def measure_steps(
    plan: Plan,
    model: torch.nn.Module,
    batch: Any,
    call: Call,
    loss: Loss | None,
    optimizer: torch.optim.Optimizer | None,
    keep_output: bool,
) -> dict[str, Measured]:
    """Real steps of copies: plain, and planned where there is a budget. The first of each warms up."""
    again = 2 if any(p.grad is not None for p in model.parameters()) else 1  # gradients that are there are added to
    found: dict[str, Measured] = {}
    with same_randomness():
        for name in ("plain", "planned") if plan.budget else ("plain",):
            twin, own = twins(model, optimizer)
            if name == "planned":
                stow_model(twin, Wanted(), plan)
            trainee = Trainee(twin, own, call, loss, batch, again, keep_output)
            found[name] = _measured(trainee, plan.graph.device, applies=optimizer is not None)
            if name == "plain":
                found[name] = replace(found[name], saved=_saved(trainee))
    return found


def _measured(trainee: Trainee, device: str, *, applies: bool) -> Measured:
    """``applies``: whether the optimizer's state and its step count."""
    seed(0)
    trainee.step()
    trainee.optimizer.step()
    trainee.begin()
    there = sum(nbytes for _, _, nbytes in resident_items(trainee.model, trainee.batch, device))
    if applies:
        there += state_bytes(trainee.optimizer, device)
    with measure_peak(device) as memory:
        loss = trainee.finish()
        if applies:
            trainee.optimizer.step()
    del loss
    return Measured(memory.peak_bytes, there + memory.peak_bytes, memory.rss_peak_bytes, timeline=memory.timeline)


def _saved(trainee: Trainee) -> dict[str, int]:
    known = [*trainee.model.parameters(), *trainee.model.buffers(), *tensors(trainee.batch)]
    addresses = {t.untyped_storage().data_ptr() for t in known if t.layout is torch.strided}
    return saved_by_modules(trainee.model, trainee.loss_of_forward, addresses)
