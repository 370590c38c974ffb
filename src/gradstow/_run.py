"""How one kind of batch is run: planned after a rehearsal, or recorded for one real step and planned then."""

from __future__ import annotations

import threading
import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from gradstow._errors import CaptureError
from gradstow._plan import Plan
from gradstow._planning import Progress, check_devices, plan_graph, plan_step
from gradstow._units import Budget
from gradstow.capture import (
    RehearsalFailed,
    Seen,
    Step,
    batch_signature,
    device_of,
    first_line,
    graph_breaks,
    recorded_graph,
    see,
    storage_key,
)
from gradstow.execute import Executor, Planned, Recorded, UnknownGraph, inner_error
from gradstow.ir import GraphBreak, StepGraph


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user asked for, for every kind of batch. ``plan`` serves the batch that it was made for."""

    budget: Budget | None
    plan: Plan | None
    policy: str
    optimizer: torch.optim.Optimizer | None
    progress: Progress | None


class Run:
    """Runs a module's training forward for one kind of batch.

    The step is rehearsed on fakes and planned before anything runs. Where fakes do not do, or where the graph that
    really runs is another one, a real step is recorded, storing all, and planned from what it did.
    """

    def __init__(self, module: torch.nn.Module, wishes: Wishes) -> None:
        self.wishes = wishes
        self._names = _Names(module)
        self._executors: dict[bool, Executor] = {}  # by whether gradients exist already
        self._recording: _Recording | None = None
        self._told = False  # what a model that asks whether it is being compiled hears while it is recorded
        self._lock = threading.RLock()
        self.last: Plan | None = None

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if self._recording is not None and not self._recording.complete:
            return self._recording(module, args, kwargs)
        executor, fresh = self._executor(module, args, kwargs)
        if executor is None:
            return self._record(module, args, kwargs)
        try:
            return self._execute(executor, module, args, kwargs)
        except Exception as error:
            if not isinstance(inner_error(error), UnknownGraph) or _planned(executor).strict:
                raise
        if not fresh and self._plan_again(executor, module, args, kwargs):
            try:
                return self._execute(executor, module, args, kwargs)
            except Exception as error:
                if not isinstance(inner_error(error), UnknownGraph):
                    raise
        return self._record(module, args, kwargs, "the graph that really runs is not the one that was rehearsed")

    def _execute(self, executor: Executor, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        output = executor(module, args, kwargs)
        planned = {sum(r.managed for r in plan.graph.regions) for plan in _planned(executor).plans}
        if not executor.ran:
            raise _nothing_captured(module, "hooks, or code that PyTorch's tracer leaves out")
        if executor.ran not in planned:  # the rest ran as plain PyTorch, outside of any graph
            _planned(executor).outdated = True
        return output

    def _executor(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Executor | None, bool]:
        """What runs this step, and whether it is new; None where the step has to be recorded."""
        with self._lock:
            gradients = any(p.grad is not None for p in module.parameters())
            known = self._executors.get(gradients)
            if known is not None and not _planned(known).outdated:
                return known, False
            if known is not None:
                self._say_recorded(module, "other graphs than planned ran in the last step")
                return None, False
            try:
                plan, strict = self._plan(module, args, kwargs)
            except RehearsalFailed as error:
                self._told = error.told
                self._say_recorded(module, f"it cannot run on fake tensors ({first_line(error)})")
                return None, False
            self._executors[gradients] = Executor(Planned(plan, strict=strict), self._names, plan.graph.device)
            return self._executors[gradients], True

    def _plan(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Plan, bool]:
        """A plan for this call, and whether nothing else may run."""
        wishes = self.wishes
        if wishes.plan is not None and wishes.plan.graph.batch == batch_signature((args, kwargs)):
            self.last = wishes.plan
            return wishes.plan, True
        step = Step(_call, (args, kwargs), optimizer=wishes.optimizer)
        if self._recording is not None:
            graph = self._recording.graph(module, step)
            self.last = plan_graph(graph, wishes.budget, wishes.policy, wishes.progress)
        else:
            self.last = plan_step(module, step, wishes.budget, wishes.policy, wishes.progress)
        return self.last, False

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
        self._executors.clear()
        self._recording = _Recording(module, self._names, self._told)
        return self._recording(module, args, kwargs)

    def _say_recorded(self, module: torch.nn.Module, why: str) -> None:
        warnings.warn(
            f"gradstow: this step of {type(module).__name__} is recorded as it runs, may exceed the budget, and the "
            f"next one is planned from it: {why}",
            stacklevel=2,
        )


class _Recording:
    """Steps that run storing all, until one has run its backward."""

    def __init__(self, module: torch.nn.Module, names: _Names, told: bool) -> None:
        self._source = Recorded(module, device_of(module), told=told)
        self._executor = Executor(self._source, names, device_of(module))
        self._breaks: tuple[GraphBreak, ...] = ()
        self._seen: Seen | None = None

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        self._source.start()
        try:
            with graph_breaks() as breaks:
                output = self._executor(module, args, kwargs)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            raise CaptureError(
                f"{type(module).__name__} cannot be captured: {inner_error(error)}. It trains as plain PyTorch; "
                "stow the parts that do not contain what fails."
            ) from error
        self._breaks += tuple(b for b in breaks() if b not in self._breaks)
        if not self._source.log.order:
            reasons = "; ".join(b.reason for b in self._breaks) or "PyTorch's tracer leaves it out"
            raise _nothing_captured(module, reasons)
        self._seen = see(module, (args, kwargs), output, self._breaks)
        return output

    @property
    def complete(self) -> bool:
        return self._source.log.complete

    def graph(self, module: torch.nn.Module, step: Step) -> StepGraph:
        assert self._seen is not None, "asked for only when complete"
        return recorded_graph(module, step, self._source.log, self._seen, told=self._source.told)


def _nothing_captured(module: torch.nn.Module, reasons: str) -> CaptureError:
    return CaptureError(
        f"no part of {type(module).__name__} could be captured, so no budget can hold: {reasons}. It trains as plain "
        "PyTorch; stow other parts of the model."
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
