"""From a model, a batch and a loss to a StepGraph: rehearse, then describe what was seen."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradstow._errors import CaptureError, GradstowError
from gradstow.capture._backend import call_module, compile_settings, fresh_function
from gradstow.capture._fake_memory import FakeMemory
from gradstow.capture._fakes import Fakes, same_randomness
from gradstow.capture._log import RegionRecord, StepLog
from gradstow.capture._normalize import normalize
from gradstow.capture._outside import outside_ops
from gradstow.capture._region import JointGraph, build_region, fingerprint
from gradstow.capture._rehearse import Recorder, storage_key
from gradstow.capture._tree import batch_signature, tensors
from gradstow.ir import GraphBreak, Region, Resident, StepGraph

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Step:
    """What the user's training step does, as far as gradstow is told.

    Attributes:
        call: how the model is called: ``call(model)`` runs its forward and returns the output.
        inputs: what ``call`` feeds to the model; tensors in it are replaced by fakes.
        batch: what the loss gets as its second argument.
        loss: ``loss(output, batch)``; None means that the output is the loss or has a ``.loss``.
        optimizer: adds the optimizer's state and its step's working memory.
        outputs_held: whether the loop still holds the model's output while the backward runs.
    """

    call: Callable[[Any, Any], Any]
    inputs: Any
    batch: Any = None
    loss: Loss | None = None
    optimizer: torch.optim.Optimizer | None = None
    outputs_held: bool = True


class RehearsalFailed(CaptureError):
    """The step cannot run on fake tensors; on real ones it may.

    Attributes:
        told: whether the model has to hear that it is being compiled for its code to be traced at all.
    """

    told = False


def capture(model: torch.nn.Module, step: Step) -> StepGraph:
    """Rehearse ``step`` on fake tensors and return its graph. Allocates nothing of the step's size.

    A model that asks whether it is being compiled hears no, so that it goes the way that it goes in plain PyTorch.
    Where that way cannot be traced whole it hears yes, if that helps.

    Raises:
        RehearsalFailed: where fakes do not do.
        CaptureError: where there is nothing to plan; the model is unchanged.
    """
    graph: StepGraph | None = None
    untraceable = False
    try:
        graph = _capture(model, step, told=False)
    except RehearsalFailed as error:
        untraceable = _untraceable(error)
    if graph is not None and not graph.breaks:
        return graph
    try:
        other = _capture(model, step, told=True)
    except CaptureError as error:
        if graph is None:
            if isinstance(error, RehearsalFailed):
                error.told = untraceable and not _untraceable(error)
            raise
        return graph
    return other if graph is None or len(other.breaks) < len(graph.breaks) else graph


def _untraceable(error: BaseException | None) -> bool:
    """Whether an op cannot be traced, so that Dynamo fails on real tensors, too."""
    while error is not None and not isinstance(error, torch._dynamo.exc.TorchRuntimeError):
        error = error.__cause__
    return error is not None


def was_told(graph: StepGraph) -> bool:
    """Whether the model heard that it was being compiled when this graph was captured."""
    return graph.versions.get("compiling") == "told"


def _noting(graph: StepGraph, told: bool) -> StepGraph:
    return replace(graph, versions={**graph.versions, "compiling": "told"}) if told else graph


def _capture(model: torch.nn.Module, step: Step, *, told: bool) -> StepGraph:
    device = device_of(model)
    fakes = Fakes()
    with same_randomness(), compile_settings(told), graph_breaks() as breaks:
        try:
            return _noting(_rehearse(model, step, fakes, device, breaks), told)
        except GradstowError:
            raise
        except Exception as error:
            raise RehearsalFailed(
                f"the training step of {type(model).__name__} cannot be rehearsed on fake tensors: "
                f"{first_line(error)}. The model is unchanged and trains as plain PyTorch. "
                "gs.stow(model, budget=...) records the first real step instead, or run the part that fails "
                "outside of the stowed module."
            ) from error


def _rehearse(
    model: torch.nn.Module, step: Step, fakes: Fakes, device: str, breaks: Callable[[], tuple[GraphBreak, ...]]
) -> StepGraph:
    twin = fakes.model(model)
    recorder = Recorder([p for p in twin.parameters() if p.requires_grad], device)
    inputs, batch = fakes.tree(step.inputs), fakes.tree(step.batch)
    with fakes.mode:
        compiled = recorder.compile(fresh_function(call_module))
        rehearsed = _Rehearsed(compiled, twin)
        output = step.call(rehearsed, inputs)
        names, room = outside_ops(output, _resident_keys(twin, (inputs, batch)))
        loss = find_loss(output) if step.loss is None and not step.outputs_held else None
        if loss is not None:  # the loop drops the output, but backward() is called on the loss
            room += loss.untyped_storage().nbytes()
        reserve = _run_loss(recorder, step, output, batch)
        optimizer = _rehearse_optimizer(fakes, step.optimizer, device)
    seen = Seen(rehearsed.called_with, reserve, (names, room), breaks())
    return _step_graph(model, step, recorder.log, seen, optimizer)


@dataclass(frozen=True)
class Seen:
    """What a step's forward shows beside its graphs.

    Attributes:
        batch: signature of what the model was called with.
        reserve_bytes: room for a loss that is not known.
        outside: names of ops outside of any graph, and the room for them in bytes.
        breaks: why graphs ended.
    """

    batch: str
    reserve_bytes: int
    outside: tuple[tuple[str, ...], int]
    breaks: tuple[GraphBreak, ...]


def see(model: torch.nn.Module, inputs: Any, output: Any, breaks: tuple[GraphBreak, ...]) -> Seen:
    """Look at a real forward, before its backward."""
    outside = outside_ops(output, _resident_keys(model, inputs))
    return Seen(batch_signature(inputs), loss_reserve(output), outside, breaks)


def _resident_keys(model: torch.nn.Module, inputs: Any) -> set[int]:
    there = [*model.parameters(), *model.buffers(), *tensors(inputs)]
    return {storage_key(t) for t in there if t.layout is torch.strided}


def recorded_graph(model: torch.nn.Module, step: Step, log: StepLog, seen: Seen, *, told: bool = False) -> StepGraph:
    """The graph of a real step that was logged as it ran.

    Raises:
        CaptureError: there is nothing to plan.
    """
    fakes = Fakes()
    with same_randomness():
        for parameter in model.parameters():
            fakes.tensor(parameter)
        with fakes.mode:
            optimizer = _rehearse_optimizer(fakes, step.optimizer, device_of(model), make_gradients=True)
    return _noting(_step_graph(model, step, log, seen, optimizer), told)


def _step_graph(model: torch.nn.Module, step: Step, log: StepLog, seen: Seen, optimizer: tuple[int, int]) -> StepGraph:
    order, device = log.order, device_of(model)
    _check_recorded(model, order, seen.breaks)
    if not log.complete:
        raise CaptureError(
            f"the loss does not depend on any trainable parameter of {type(model).__name__}, so there is no "
            "backward to plan. Check that the loss uses the model's output and that it is not detached."
        )
    last = max(i for i, r in enumerate(order) if r.compiled.managed)
    joints = [
        # the loss itself is always held: backward() is called on it
        _describe(i, r, device, held=i > last or (i == last and step.outputs_held))
        for i, r in enumerate(order)
    ]
    return StepGraph(
        regions=_with_origins([j.region for j in joints], order),
        resident=replace(resident_bytes(model, (step.inputs, step.batch), device), optimizer=optimizer[0]),
        device=device,
        reserve_bytes=seen.reserve_bytes,
        optimizer_peak_bytes=optimizer[1],
        grads_exist=any(p.grad is not None for p in model.parameters()),
        outputs_held=step.outputs_held,
        batch=seen.batch,
        model=type(model).__qualname__,
        weights=weights_signature(model),
        breaks=seen.breaks,
        outside=seen.outside[0],
        outside_bytes=seen.outside[1],
        versions={"torch": torch.__version__},
    )


def _check_recorded(model: torch.nn.Module, order: list[RegionRecord], breaks: tuple[GraphBreak, ...]) -> None:
    if any(r.compiled.managed for r in order):
        return
    reasons = "; ".join(b.reason for b in breaks) or "no reason given"
    raise CaptureError(
        f"no part of {type(model).__name__} could be captured as a graph, so there is nothing to plan: {reasons}. "
        "Stow sub-modules that do not contain the part that ends the graph."
    )


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


def _run_loss(recorder: Recorder, step: Step, output: Any, batch: Any) -> int:
    """Compute the loss and run the backward; returns the room to reserve where the loss is not known."""
    if step.loss is not None:
        with recorder.unmanaged():
            loss = recorder.compile(fresh_function(_call_loss))(step.loss, output, batch)
        check_loss(loss)
        loss.backward()
        return 0
    loss = find_loss(output)
    if loss is not None:
        loss.backward()
        return 0
    outputs = _differentiable(output)
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
    return loss_reserve(output)


def loss_reserve(output: Any) -> int:
    """Room for a loss that is not known: twice the outputs that it can depend on, in bytes; 0 where one is the loss."""
    if find_loss(output) is not None:
        return 0
    return 2 * sum(t.untyped_storage().nbytes() for t in _differentiable(output))


def _differentiable(output: Any) -> list[torch.Tensor]:
    return [t for t in tensors(output) if t.requires_grad]


def _call_loss(loss: Loss, output: Any, batch: Any) -> Any:
    return loss(output, batch)


def find_loss(output: Any) -> torch.Tensor | None:
    """The loss inside a model's output: the output itself if it is one number, else its ``.loss``."""
    candidates = [output, getattr(output, "loss", None)]
    if isinstance(output, Mapping):
        candidates.append(output.get("loss"))
    for item in candidates:
        if isinstance(item, torch.Tensor) and item.numel() == 1 and item.requires_grad:
            return item
    return None


def check_loss(loss: Any) -> None:
    """Refuse what cannot be a loss.

    Raises:
        CaptureError: not a tensor, not one number, or without a gradient.
    """
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(f"the loss is a {type(loss).__name__}, not a tensor. Return a tensor with one number.")
    if loss.numel() != 1:
        raise CaptureError(f"the loss has shape {tuple(loss.shape)}, not one number. Reduce it, for example .mean().")
    if not loss.requires_grad:
        raise CaptureError(
            "the loss does not depend on any trainable parameter of the model (it has no gradient). "
            "Check that it uses the model's output and that nothing is detached."
        )


def _rehearse_optimizer(fakes: Fakes, optimizer: Any, device: str, *, make_gradients: bool = False) -> tuple[int, int]:
    """(bytes of the optimizer's state, working memory of its step above that)."""
    if optimizer is None:
        return 0, 0
    twin = fakes.optimizer(optimizer)
    for parameter in (p for group in twin.param_groups for p in group["params"] if make_gradients):
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    twin.step()  # makes the state
    with FakeMemory(device) as memory:
        twin.step()
    seen: dict[int, int] = {}
    for state in twin.state.values():
        for item in tensors(state):
            if item.device.type == device:
                seen[storage_key(item)] = item.untyped_storage().nbytes()
    return sum(seen.values()), memory.peak_bytes


def _describe(index: int, record: RegionRecord, device: str, *, held: bool) -> JointGraph:
    graph = record.compiled
    mask = record.mask if record.ran_backward else None
    module = normalize(graph.joint, mask)
    return build_region(
        module,
        graph.num_forward_outputs,
        record.roles,
        name=f"region {index}" if graph.managed else "loss",
        mask=record.mask,
        print_=fingerprint(graph.joint, graph.num_forward_outputs),
        held=held,
        managed=graph.managed,
        device=device,
    )


def _with_origins(regions: list[Region], order: list[RegionRecord]) -> tuple[Region, ...]:
    """Turn each boundary storage's origin from (region, output position) into (region, storage)."""
    result: list[Region] = []
    for region in regions:
        storages = list(region.storages)
        for i, storage in enumerate(storages):
            if storage.origin is not None:
                maker, position = storage.origin
                source = result[maker]
                made = source.values[source.outputs[position]].storage
                origin = source.storages[made].origin or (maker, made)
                storages[i] = replace(storage, origin=origin)
        result.append(replace(region, storages=tuple(storages)))
    return tuple(result)


def device_of(model: torch.nn.Module) -> str:
    """The one kind of device that the parameters are on.

    Raises:
        CaptureError: no trainable parameter, or parameters on several kinds of device.
    """
    devices = {p.device.type for p in model.parameters() if p.requires_grad}
    if not devices:
        raise CaptureError(
            f"{type(model).__name__} has no trainable parameters, so there is no backward to plan. "
            "Set requires_grad_(True) on what is to be trained."
        )
    if len(devices) > 1:
        raise CaptureError(f"the parameters are on several devices ({', '.join(sorted(devices))}). Use one device.")
    (device,) = devices
    if device not in ("cpu", "cuda"):
        raise CaptureError(f"the parameters are on {device}. gradstow trains on cpu and cuda: move the model there.")
    return device


def weights_signature(model: torch.nn.Module) -> str:
    """A short hash of the names, shapes and dtypes of a model's parameters and buffers."""
    items = [*model.named_parameters(), *model.named_buffers()]
    text = ";".join(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in items)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def resident_bytes(model: torch.nn.Module, batch: Any, device: str) -> Resident:
    """What the model and the batch hold, each storage once, in bytes."""
    seen: set[int] = set()

    def count(items: Any) -> int:
        total = 0
        for tensor in items:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == device and tensor.layout is torch.strided:
                key = storage_key(tensor)
                total += 0 if key in seen else tensor.untyped_storage().nbytes()
                seen.add(key)
        return total

    return Resident(
        parameters=count(model.parameters()),
        buffers=count(model.buffers()),
        gradients=count(p.grad for p in model.parameters()),
        batch=count(tensors(batch)),
    )


@contextlib.contextmanager
def graph_breaks() -> Iterator[Callable[[], tuple[GraphBreak, ...]]]:
    """Gives a function that tells Dynamo's graph breaks since entry."""
    from torch._dynamo.utils import counters  # its own record of why graphs end

    before = dict(counters["graph_break"])

    def since() -> tuple[GraphBreak, ...]:
        new = [r for r, times in counters["graph_break"].items() if times > before.get(r, 0)]
        return tuple(GraphBreak(reason=_first_line_of(str(r)), source="") for r in new)

    yield since


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
