"""How one kind of batch is run: planned after a rehearsal, or recorded for one real step and planned then."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradstow._errors import BudgetTooSmall, CaptureError, warn_user
from gradstow._plan import Plan
from gradstow._planning import capture_step, check_devices, plan_alone, plan_captured, share_of
from gradstow._units import Budget, format_bytes
from gradstow._wanted import Wanted
from gradstow.capture import (
    Captured,
    RehearsalFailed,
    Seen,
    Step,
    applied_gradients,
    batch_signature,
    captured_from,
    device_of,
    existing_gradients,
    expose_parts,
    first_line,
    listen,
    nothing_captured,
    on_real_tensors,
    resident_bytes,
    see,
    storage_key,
)
from gradstow.execute import Excess, Executor, OverPlanned, Planned, Recorded, UnknownGraph, inner_error
from gradstow.ir import GraphBreak, Region, RegionSchedule

_RECORDS = 2  # a model whose graphs change after that is taken for one that always changes
_TRIES = 4  # plans that are compiled until one is met
_MOST_GRAPHS = 128  # under the limit at which Dynamo itself gives up, silently


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user asked for, for every kind of batch. Each of ``plans`` serves the batch that it was made for."""

    wanted: Wanted
    plans: tuple[Plan, ...]
    optimizer: torch.optim.Optimizer | None


class Run:
    """Runs a module's training forward for one kind of batch.

    The step is rehearsed on fakes and planned before anything runs. Where fakes do not do, or where the graph that
    really runs is another one, a real step is recorded, storing all, and planned from what it did.
    """

    def __init__(self, module: torch.nn.Module, wishes: Wishes, met: Callable[[], int] = lambda: 0) -> None:
        self.wishes = wishes
        self._met = met  # the largest step budget that the model had for another kind of batch, in bytes
        self._names = _Names(module)
        # by which gradients exist already, and which are applied inside the backward
        self._executors: dict[tuple[frozenset[int], frozenset[int]], Executor] = {}
        self._recording: _Recording | None = None
        self._records, self._said, self._plain = 0, False, False
        self._told = False  # what a model that asks whether it is being compiled hears while it is recorded
        self._margin = 0  # bytes of the budget that compiled code takes beside the plan
        self._captured: Captured | None = None  # while plans of it are tried
        self._lock = threading.RLock()
        self.last: Plan | None = None

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if self._plain:
            return module._call_impl(*args, **kwargs)
        if self._recording is not None and not self._recording.complete:
            return self._recording(module, args, kwargs)
        excess = Excess()
        for _ in range(_TRIES):
            executor, fresh = self._executor(module, args, kwargs)
            if executor is None:
                return self._record(module, args, kwargs)
            try:
                return self._execute(executor, module, args, kwargs, fresh)
            except Exception as error:
                inner = inner_error(error)
                if not isinstance(inner, OverPlanned):
                    self._captured = None  # only a plan that is tried again is of the same step
                if isinstance(inner, UnknownGraph) and not _planned(executor).strict:
                    break
                if not isinstance(inner, OverPlanned):
                    raise
                excess = inner.excess
                self._tighten(executor, excess)
        else:
            assert self.last is not None, "it was tried"
            raise _needs_more(self.last.predicted_peak_bytes, excess.beside)
        if not fresh and self._plan_again(executor, module, args, kwargs):
            try:
                return self._execute(executor, module, args, kwargs)
            except Exception as error:
                if not isinstance(inner_error(error), UnknownGraph):
                    raise
        return self._record(module, args, kwargs, "the graph that really runs is not the one that was rehearsed")

    def _execute(self, executor: Executor, module: torch.nn.Module, args: Any, kwargs: Any, fresh: bool = False) -> Any:
        output = executor(module, args, kwargs)
        self._captured = None
        self._mind_compiled(executor)
        planned = {sum(r.managed for r in plan.graph.regions) for plan in _planned(executor).plans}
        if not executor.ran and fresh:
            raise nothing_captured(module, ())
        if executor.ran > max(planned):  # fewer need less: a layer was left out in this step
            _planned(executor).grew = True
        if len(executor.programs) > _MOST_GRAPHS + max(planned):
            self._give_up(module)
        return output

    def _tighten(self, executor: Executor, excess: Excess) -> None:
        """Leave room for what compiled code takes beside the plan, of which nothing has run yet."""
        if _planned(executor).strict:
            plan = _planned(executor).plans[-1]
            raise _needs_more(plan.predicted_peak_bytes, excess.beside)
        self._leave_room(executor, excess)

    def _mind_compiled(self, executor: Executor) -> None:
        """Where a later graph of the step turned out to need more than planned, the next step leaves room for it."""
        source = _planned(executor)
        if source.excess.over > 0:
            self._leave_room(executor, source.excess)
            source.excess = Excess()

    def _leave_room(self, executor: Executor, excess: Excess) -> None:
        """The step is planned again, with as much of the budget left free as compiled code takes beside its plan."""
        self._margin = excess.margin(self._margin)
        self._executors = {k: known for k, known in self._executors.items() if known is not executor}

    def _give_up(self, module: torch.nn.Module) -> None:
        """Compiling without end would take more time than training, and ever more memory."""
        self._plain, self._recording = True, None
        self._executors.clear()
        warn_user(
            f"gradstow: {type(module).__name__} has made more than {_MOST_GRAPHS} new graphs while training, as when "
            "every step computes with another Python number (.item(), NumPy). From here on it runs as plain PyTorch, "
            "outside of any budget. Keep such numbers in tensors, or stow the parts without them."
        )

    def _executor(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Executor | None, bool]:
        """What runs this step, and whether it is new; None where the step has to be recorded."""
        with self._lock:
            gradients = existing_gradients(module), frozenset(applied_gradients(module))
            known = self._executors.get(gradients)
            if known is not None and not self._outdated(module, _planned(known)):
                return known, False
            if known is not None:
                self._say_recorded(module, "other graphs than planned ran in the last step")
                return None, False
            try:
                plan, strict = self._plan(module, args, kwargs)
            except RehearsalFailed as error:
                self._told = error.told
                if error.users_own is None:  # else the real forward raises it, too
                    self._say_recorded(module, f"it cannot run on fake tensors ({first_line(error)})")
                return None, False
            if plan.graph.parts:
                expose_parts(module)
            source = Planned([plan], strict=strict, alone=self._plan_alone)
            self._executors[gradients] = Executor(source, self._names, plan.graph.device, plan.graph.codegen)
            return self._executors[gradients], True

    def _outdated(self, module: torch.nn.Module, source: Planned) -> bool:
        """Whether the next step has to be recorded: not for ever, where every step has graphs of its own."""
        if source.unknown and self._records >= _RECORDS and not self._said:
            self._said = True
            warn_user(
                f"gradstow: {type(module).__name__} runs other graphs from step to step. Each new one is planned "
                "alone, for its share of the budget, which steps may exceed."
            )
        return source.grew or (source.unknown and self._records < _RECORDS)

    def _plan_alone(self, region: Region) -> RegionSchedule:
        """Plan a graph that turned up in the middle of a step."""
        assert self.last is not None, "some plan's executor asks"
        wanted, last = self.wishes.wanted, self.last
        graph = replace(last.graph, regions=(region,), reserve_bytes=0, outside=(), outside_bytes=0)
        with on_real_tensors():
            share = None if wanted.budget is None else share_of(wanted.budget, last)
            try:
                return plan_alone(graph, wanted.limited(share))
            except BudgetTooSmall as error:  # as little as can be
                return plan_alone(graph, wanted.limited(Budget(total_bytes=error.minimum_bytes)))

    def _plan(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Plan, bool]:
        """A plan for this call, and whether nothing else may run."""
        wishes = self.wishes
        for plan in wishes.plans:
            if _serves(plan, module, args, kwargs):
                self.last = plan
                return plan, True
        step = Step(_call, (args, kwargs), optimizer=wishes.optimizer)
        if self._recording is not None:
            self.last = self._within(self._recording.captured(module, step), wishes.wanted)
        else:
            captured = self._captured or capture_step(module, step, wishes.wanted)
            self._captured = captured if wishes.wanted.codegen == "inductor" else None
            try:
                self.last = self._within(captured, replace(wishes.wanted, margin=self._margin))
            except BudgetTooSmall as error:
                if not self._margin:
                    raise
                raise _needs_more(error.minimum_bytes, self._margin) from error
        return self.last, False

    def _within(self, captured: Captured, wanted: Wanted) -> Plan:
        """A plan within the budget. A percentage that does not do for a small batch is that of a batch before it."""
        try:
            return plan_captured(captured, wanted)
        except BudgetTooSmall:
            met = self._met()
            if wanted.budget is None or wanted.budget.percent is None or not met:
                raise
            try:
                return plan_captured(captured, wanted.limited(Budget(total_bytes=met + captured.resident_bytes)))
            except BudgetTooSmall:
                pass
            raise

    def _plan_again(self, executor: Executor, module: torch.nn.Module, args: Any, kwargs: Any) -> bool:
        """The model changed: rehearse what it is now. The old plan stays, for when it changes back."""
        self._recording = None
        with self._lock:
            try:
                plan, _ = self._plan(module, args, kwargs)
            except RehearsalFailed:
                return False
            _planned(executor).plans.append(plan)
            return True

    def _record(self, module: torch.nn.Module, args: Any, kwargs: Any, why: str = "") -> Any:
        if why:
            self._say_recorded(module, why)
        check_devices(module, (args, kwargs))
        self._records += 1
        self._executors.clear()
        self._recording = _Recording(module, self._names, self._told, self.wishes.wanted.codegen)
        return self._recording(module, args, kwargs)

    def _say_recorded(self, module: torch.nn.Module, why: str) -> None:
        warn_user(
            f"gradstow: this step of {type(module).__name__} is recorded as it runs, may exceed the budget, and the "
            f"next one is planned from it: {why}"
        )


class _Recording:
    """Steps that run storing all, until one has run its backward."""

    def __init__(self, module: torch.nn.Module, names: _Names, told: bool, codegen: str) -> None:
        self._source = Recorded(module, device_of(module), told=told)
        self._executor = Executor(self._source, names, device_of(module), codegen)
        self._codegen = codegen
        self._breaks: tuple[GraphBreak, ...] = ()
        self._seen: Seen | None = None

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        self._source.start()
        try:
            with listen() as heard:
                output = self._executor(module, args, kwargs)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            raise CaptureError(
                f"{type(module).__name__} cannot be captured: {inner_error(error)}. It trains as plain PyTorch; "
                "stow the parts that do not contain what fails."
            ) from error
        self._breaks += tuple(b for b in heard.breaks() if b not in self._breaks)
        if not self._source.log.order:
            if not expose_parts(module):
                raise nothing_captured(module, self._breaks)
            return output  # this step ran as plain PyTorch, and the next one is recorded
        self._seen = see(module, (args, kwargs), output, self._source.log, self._breaks, tuple(heard.calls))
        return output

    @property
    def complete(self) -> bool:
        return self._source.log.complete

    def captured(self, module: torch.nn.Module, step: Step) -> Captured:
        assert self._seen is not None, "asked for only when complete"
        found = captured_from(module, step, self._source.log, self._seen, self._codegen)
        return found.told(self._source.told)


def _serves(plan: Plan, module: torch.nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether a plan that was handed in is for this batch, and for as many gradients as exist."""
    if plan.graph.batch != batch_signature((args, kwargs)):
        return False
    if any(region.applied for region in plan.graph.regions) != bool(applied_gradients(module)):
        return False
    there = resident_bytes(module, (), plan.graph.device).gradients
    return not plan.budget or plan.graph.resident.gradients == there


def _needs_more(planned_bytes: int, over_bytes: int) -> BudgetTooSmall:
    needed = planned_bytes + over_bytes
    return BudgetTooSmall(
        f"the compiled code needs {format_bytes(over_bytes)} beside what is planned for it, and no plan is left that "
        f"leaves as much. Give at least {needed} bytes ({format_bytes(needed)}), or use codegen='eager', whose peak is "
        "as planned.",
        minimum_bytes=needed,
    )


def _planned(executor: Executor) -> Planned:
    assert isinstance(executor.source, Planned)
    return executor.source


def _call(model: Any, inputs: Any) -> Any:
    args, kwargs = inputs
    return model(*args, **kwargs)


class _Names:
    """Names of a model's tensors, for messages: looked up only when something went wrong."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self, tensor: torch.Tensor) -> str:
        module = self._module()
        if module is not None:
            for kind, items in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
                for name, item in items:
                    if item is tensor or storage_key(item) == storage_key(tensor):
                        return f"the {kind} {name}"
        return f"an input of shape {tuple(tensor.shape)}"
