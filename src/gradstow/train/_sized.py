"""One training step, planned for any number of samples, with and without gradients that exist already."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from gradstow._api import make_step
from gradstow._errors import BudgetTooSmall, GradstowError, warn_user
from gradstow._plan import Plan
from gradstow._planning import capture_step, free_bytes, plan_captured, price, users_errors
from gradstow._units import Budget
from gradstow._wanted import Wanted
from gradstow.capture import Captured, RehearsalFailed, device_of, resident_bytes, tensors
from gradstow.ir import Resident
from gradstow.planner import Effort, plain_step_peak
from gradstow.train._given import check_callable, check_model, optimizers_of
from gradstow.train._grown import Samples
from gradstow.train._precision import Precision

Loss = Callable[[Any, Any], Any]
Forward = Callable[[Any, Any], Any]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None

_AGAIN = 3
_FREE_SHARE = 0.9  # of the free memory, for budget="auto"; as in gs.plan


@dataclass
class SizedStep:
    """A step whose batch may have any number of samples.

    Attributes:
        samples: makes batches on fake tensors.
        loss: ``loss(output, batch)``: a scalar, or a pair (mean, count) of which the mean is planned.
        precision: the model runs under its autocast, the loss on outputs that it casts up.
        keep_output: whether the loop holds the model's output during the backward.
    """

    model: torch.nn.Module
    samples: Samples
    loss: Loss | None
    optimizer: Optimizers
    forward: Forward | None
    precision: Precision
    keep_output: bool
    wanted: Wanted

    def __post_init__(self) -> None:
        check_model(self.model)
        check_callable(loss=self.loss, forward=self.forward)
        if self.optimizer is not None and not isinstance(self.optimizer, _Several):
            optimizers_of(self.optimizer)
        self._captured: dict[int, Captured] = {}
        self.batch_bytes = 0  # of the whole batch, of which micro-batches are views

    def plan(self, count: int, effort: str | Effort, *, adds: bool = False) -> Plan:
        """The plan of a step of ``count`` samples; with ``adds`` its gradients are added to existing ones.

        Raises:
            BudgetTooSmall, CaptureError.
        """
        captured = self.captured(count)
        captured = with_gradients(captured, self.model) if adds else captured
        own = captured.common.resident
        resident = replace(own, batch=max(own.batch, self.batch_bytes))
        captured = replace(captured, common=replace(captured.common, resident=resident))
        with users_errors():
            return plan_captured(captured, replace(self._saying(count), effort=Effort.of(effort)))

    def smallest_bytes(self, count: int, error: BudgetTooSmall, *, adds: bool = False) -> int:
        """The smallest budget, where one was refused: room for ``optimizer.step`` included."""
        needed, wanted = error.minimum_bytes, self.wanted
        try:
            for _ in range(_AGAIN):
                self.wanted = wanted.limited(Budget(total_bytes=needed))
                try:
                    self.plan(count, "quick", adds=adds)
                except BudgetTooSmall as again:
                    needed = max(again.minimum_bytes, needed + 1)
                else:
                    break
        finally:
            self.wanted = wanted
        return needed

    def captured(self, count: int) -> Captured:
        """The rehearsed step of so many samples."""
        if count not in self._captured:
            try:
                self._captured[count] = self._rehearse(count)
            except RehearsalFailed as error:
                if self.loss is None or error.users_own is not None:
                    raise
                self._captured[count] = self._without_loss(count)
        return self._captured[count]

    def bytes_of(self, count: int) -> int:
        """What a batch of so many samples holds on the model's device."""
        return resident_bytes(self.model, self.samples(count), device_of(self.model)).batch

    def plain_peak_bytes(self, count: int) -> tuple[Resident, int]:
        """What is resident for a step of plain PyTorch, and its step peak above that."""
        captured = self.captured(count)
        priced = price(captured.graph(), self.wanted.limited(None))
        return captured.common.resident, plain_step_peak(priced.graph, priced.costs)

    def _without_loss(self, count: int) -> Captured:
        """A loss that asks its data (``.item()``) cannot be rehearsed: room is left for it, as ``gs.stow`` does."""
        loss, self.loss = self.loss, None
        try:
            found = self._rehearse(count)
        except GradstowError:
            self.loss = loss
            raise
        warn_user(
            "gradstow: the loss cannot run on fake tensors, so the plan leaves room for six times the outputs instead. "
            "Return counts as tensors, without .item()."
        )
        return found

    def _rehearse(self, count: int) -> Captured:
        batch = self.samples(count)
        device = device_of(self.model)
        loss = None if self.loss is None else self._mean()
        step = make_step(self.model, batch, loss, joined(self.optimizer), self.forward, self.keep_output)
        call = step.call
        precision = self.precision

        def under_precision(model: Any, item: Any) -> Any:
            with precision.autocast(device):
                return call(model, item)

        return capture_step(self.model, replace(step, call=under_precision), self._saying(count))

    def _saying(self, count: int) -> Wanted:
        """Sizes are what is reported: what is done for each of them comes again and again."""
        return self.wanted.saying(f"batch of {count}")

    def _mean(self) -> Loss:
        loss, precision = self.loss, self.precision
        assert loss is not None

        def mean(output: Any, batch: Any) -> Any:
            found = loss(precision.cast_up(output), batch)
            return found[0] if isinstance(found, (tuple, list)) else found

        return mean


def absolute(budget: Budget, step: SizedStep, count: int) -> Budget:
    """The budget in bytes: a percentage is of plain PyTorch's step peak for ``count`` samples, "auto" is read once."""
    if budget.percent is not None:
        resident, peak = step.plain_peak_bytes(count)
        return Budget(total_bytes=resident.total + int(budget.percent / 100 * peak))
    if budget.auto:
        device = device_of(step.model)
        there = resident_bytes(step.model, (), device).total + _state_bytes(step.optimizer, device)
        return Budget(total_bytes=there + int(_FREE_SHARE * free_bytes(device)))
    return budget


def _state_bytes(optimizer: Optimizers, device: str) -> int:
    states = chain.from_iterable(tensors(list(o.state.values())) for o in each(optimizer))
    return sum(t.untyped_storage().nbytes() for t in states if t.device.type == device)


def with_gradients(captured: Captured, model: torch.nn.Module) -> Captured:
    """The same step where every parameter that it gives a gradient has one already."""
    trained = [p for p in model.parameters() if p.requires_grad]
    found: set[int] = set()
    known: set[int] = set()
    for region, record in zip(captured.graph().regions, captured.order, strict=True):
        for role, value in zip(record.roles, region.gradients, strict=True):
            known.add(role.parameter)
            if role.parameter >= 0 and value >= 0:
                found.add(role.parameter)
    if captured.common.outside:  # what runs outside of any graph may give gradients, too
        found |= set(range(len(trained))) - known
    nbytes = sum(trained[i].numel() * trained[i].element_size() for i in found)
    resident = replace(captured.common.resident, gradients=nbytes)
    return replace(captured, existing=frozenset(found), common=replace(captured.common, resident=resident))


def each(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """The optimizers of ``Optimizers``, or of what ``joined`` made."""
    if isinstance(optimizer, _Several):
        yield from optimizer.optimizers
    elif isinstance(optimizer, torch.optim.Optimizer):
        yield optimizer
    elif optimizer is not None:
        yield from optimizer


def joined(optimizer: Optimizers) -> Any:
    """One object that steps all optimizers in turn, for the rehearsal."""
    found = list(each(optimizer))
    if len(found) < 2:
        return found[0] if found else None
    return _Several(found)


class _Several:
    """What the planner asks of an optimizer, for several."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for one in self.optimizers for group in one.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        return {key: value for one in self.optimizers for key, value in one.state.items()}

    def step(self) -> None:
        for one in self.optimizers:
            one.step()
