"""From a model, a batch and a loss to a StepGraph: rehearse, then describe what was seen."""

from __future__ import annotations

import contextlib
import dis
import re
from collections.abc import Callable
from typing import Any

import torch

from gradstow._errors import CaptureError, GradstowError
from gradstow.capture._backend import call_module, compile_settings, fresh_function
from gradstow.capture._breaks import Listener, listen
from gradstow.capture._captured import Captured, NothingCaptured, Seen, captured
from gradstow.capture._fakes import Fakes, same_randomness
from gradstow.capture._log import StepLog
from gradstow.capture._loss import check_loss, differentiable, find_loss, loss_reserve
from gradstow.capture._model import device_of
from gradstow.capture._optimizer import rehearse_optimizer
from gradstow.capture._outside import outside_ops
from gradstow.capture._parts import expose_parts, has_parts
from gradstow.capture._places import is_users
from gradstow.capture._rehearse import Recorder
from gradstow.capture._step import Loss, Step
from gradstow.capture._tree import batch_signature, storage_key, tensors
from gradstow.ir import GraphBreak, StepGraph


class RehearsalFailed(CaptureError):
    """The step cannot run on fake tensors; on real ones it may.

    Attributes:
        users_own: an error that code outside of torch raised on purpose, which has nothing to do with fakes.
        told: whether the model has to hear that it is being compiled for its code to be traced at all.
    """

    users_own: Exception | None = None
    told = False


def capture(model: torch.nn.Module, step: Step, codegen: str = "eager") -> Captured:
    """Rehearse ``step`` on fake tensors. Allocates nothing of the step's size.

    A model that asks whether it is being compiled hears no, so that it goes the way that it goes in plain PyTorch.
    Where that way cannot be traced whole it hears yes, if that helps.

    Raises:
        RehearsalFailed: where fakes do not do.
        CaptureError: where there is nothing to plan; the model is unchanged.
    """
    first: Captured | None = None
    untraceable = False
    try:
        first = _capture(model, step, codegen, told=False)
    except RehearsalFailed as error:
        untraceable = _untraceable(error)
    if first is not None and not first.common.breaks:
        return first
    try:
        other = _capture(model, step, codegen, told=True)
    except CaptureError as error:
        if first is None:
            if isinstance(error, RehearsalFailed):
                error.told = untraceable and not _untraceable(error)
            raise
        return first
    return other if first is None or len(other.common.breaks) < len(first.common.breaks) else first


def _untraceable(error: BaseException | None) -> bool:
    """Whether an op cannot be traced, so that Dynamo fails on real tensors, too."""
    while error is not None and not isinstance(error, torch._dynamo.exc.TorchRuntimeError):
        error = error.__cause__
    return error is not None


def was_told(graph: StepGraph) -> bool:
    """Whether the model heard that it was being compiled when this graph was captured."""
    return graph.versions.get("compiling") == "told"


def _capture(model: torch.nn.Module, step: Step, codegen: str, *, told: bool) -> Captured:
    kind = (device_of(model), codegen)
    with same_randomness(), compile_settings(told), listen() as heard:
        try:
            with same_randomness(), contextlib.suppress(NothingCaptured):
                return _rehearse(model, step, Fakes(), kind, heard).told(told)
            heard.calls.clear()
            return _rehearse(model, step, Fakes(), kind, heard, parts=True).told(told)
        except GradstowError:
            raise
        except Exception as error:
            failed = RehearsalFailed(
                f"the training step of {type(model).__name__} cannot be rehearsed on fake tensors: "
                f"{first_line(error)}. The model is unchanged and trains as plain PyTorch. "
                "gs.stow(model, budget=...) records the first real step instead, or run the part that fails "
                "outside of the stowed module."
            )
            failed.users_own = error if _is_raised_by_user(error) else None
            raise failed from error


def _is_raised_by_user(error: Exception) -> bool:
    """Whether a ``raise`` or an ``assert`` outside of torch and gradstow made it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not is_users(trace.tb_frame.f_code.co_filename):
        return False
    code = trace.tb_frame.f_code.co_code
    return dis.opname[code[trace.tb_lasti]] == "RAISE_VARARGS"


def _rehearse(
    model: torch.nn.Module, step: Step, fakes: Fakes, kind: tuple[str, str], heard: Listener, parts: bool = False
) -> Captured:
    device, codegen = kind
    parts = parts or has_parts(model)
    twin = fakes.model(model)
    if parts:
        expose_parts(twin)
    recorder = Recorder([p for p in twin.parameters() if p.requires_grad], device, codegen)
    inputs, batch = fakes.tree(step.inputs), fakes.tree(step.batch)
    with fakes.mode:
        compiled = recorder.compile(fresh_function(call_module))
        rehearsed = _Rehearsed(compiled, twin)
        output = step.call(rehearsed, inputs)
        names, room = outside_ops(output, _resident_keys(twin, (inputs, batch)), recorder.log.received)
        loss, reserve = _run_loss(recorder, step, output, batch)
        if loss is not None and not step.outputs_held and _is_part(loss, output):
            room += loss.untyped_storage().nbytes()  # the loop drops the output, but backward() is called on the loss
        optimizer = rehearse_optimizer(fakes, step.optimizer, device)
    seen = Seen(rehearsed.called_with, reserve, (names, room), heard.breaks(), tuple(heard.calls))
    return captured(model, step, recorder.log, seen, optimizer, parts=parts, codegen=codegen)


def see(
    model: torch.nn.Module,
    inputs: Any,
    output: Any,
    log: StepLog,
    breaks: tuple[GraphBreak, ...],
    calls: tuple[tuple[str, int], ...],
) -> Seen:
    """Look at a real forward, before its backward."""
    outside = outside_ops(output, _resident_keys(model, inputs), log.received)
    return Seen(batch_signature(inputs), loss_reserve(output), outside, breaks, calls)


def _resident_keys(model: torch.nn.Module, inputs: Any) -> set[int]:
    there = [*model.parameters(), *model.buffers(), *tensors(inputs)]
    return {storage_key(t) for t in there if t.layout is torch.strided}


def captured_from(model: torch.nn.Module, step: Step, log: StepLog, seen: Seen, codegen: str = "eager") -> Captured:
    """A real step that was logged as it ran.

    Raises:
        CaptureError: there is nothing to plan.
    """
    fakes = Fakes()
    with same_randomness():
        for parameter in model.parameters():
            fakes.tensor(parameter)
        with fakes.mode:
            optimizer = rehearse_optimizer(fakes, step.optimizer, device_of(model), make_gradients=True)
    return captured(model, step, log, seen, optimizer, parts=has_parts(model), codegen=codegen)


class _Rehearsed:
    """Stands for the model in ``step.call``: attributes are the twin's, calls run compiled."""

    def __init__(self, compiled: Callable[..., Any], twin: torch.nn.Module) -> None:
        self._compiled, self._twin = compiled, twin
        self.called_with = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.called_with = self.called_with or batch_signature((args, kwargs))
        return self._compiled(self._twin, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._twin, name)


def _run_loss(recorder: Recorder, step: Step, output: Any, batch: Any) -> tuple[torch.Tensor | None, int]:
    """Compute the loss and run the backward; returns the loss, and the room to reserve where it is not known."""
    if step.loss is not None:
        with recorder.unmanaged():
            loss = recorder.compile(fresh_function(_call_loss))(step.loss, output, batch)
        check_loss(loss)
    else:
        loss = find_loss(output)
    if loss is not None:
        loss.backward()
        return loss, 0
    outputs = differentiable(output)
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
    return None, loss_reserve(output)


def _is_part(loss: torch.Tensor, output: Any) -> bool:
    """Whether the loss lies on memory of the model's output."""
    return storage_key(loss) in {storage_key(t) for t in tensors(output) if t.layout is torch.strided}


def _call_loss(loss: Loss, output: Any, batch: Any) -> Any:
    return loss(output, batch)


def first_line(error: BaseException) -> str:
    """What went wrong first, where torch wrapped it."""
    while error.__cause__ is not None:
        error = error.__cause__
    inner = re.search(r"got (\w+)\((['\"])(.*)\2\)$", str(error), re.MULTILINE)  # torch quotes it in its own
    if inner is not None:
        return f"{inner[1]}: {inner[3]}"
    return f"{type(error).__name__}: {_first_line_of(str(error))}"


def _first_line_of(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else "unknown"
