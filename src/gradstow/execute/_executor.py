"""Run a model's captured regions by their plan, inside the user's own training step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gradstow._errors import CaptureError, StalePlan
from gradstow.capture import aot, call_module, compile_settings, compiled_nodes, copy_graph, fingerprint, fresh_function
from gradstow.execute._eager import generate
from gradstow.execute._program import RegionProgram
from gradstow.ir import Region, RegionSchedule, Schedule, StepGraph

_CHANGED = (
    "{name} was changed in place between the forward and the backward that needs it (version {now}, "
    "expected {then}). Plain PyTorch refuses this too: change it after the backward, or on a clone."
)
_DOUBLE = (
    "create_graph=True asks for a backward of the backward, which a planned region does not have. "
    "Run this forward and backward under `with gs.plain():`, which gives plain PyTorch's numbers."
)
_AUTOCAST = (
    "the backward runs inside an autocast block, where plain PyTorch rounds some gradients otherwise than planned. "
    "Call backward after the `with torch.autocast(...)` block, as PyTorch recommends, or use `with gs.plain():`."
)


@dataclass(frozen=True, slots=True)
class _Watched:
    tensor: weakref.ref[torch.Tensor]
    version: int


class Executor:
    """Calls a module so that its captured graphs run as planned.

    Args:
        graph, schedule: the plan.
        name_of: names a tensor, for the messages.

    Raises (when called):
        StalePlan: a graph turns up that was not planned.
        CaptureError: double backward.
    """

    def __init__(self, graph: StepGraph, schedule: Schedule, name_of: Callable[[torch.Tensor], str]) -> None:
        self.graph, self.schedule = graph, schedule
        self.programs: list[RegionProgram] = []
        self._name_of = name_of
        self._call = torch.compile(fresh_function(call_module), backend=self._backend, dynamic=False)

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        with compile_settings():
            return self._call(module, args, kwargs)

    def _backend(self, module: fx.GraphModule, inputs: list[Any]) -> Any:
        programs: list[RegionProgram] = []

        def partition(joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_kwargs: Any) -> Any:
            raw = copy_graph(joint)
            region, schedule = self._find(raw, num_fwd_outputs)
            program = RegionProgram(raw, num_fwd_outputs, region, schedule, generate, self.graph.device)
            programs.append(program)
            self.programs.append(program)
            return program.lowered.forward, _for_aot(program)

        compiled = aot(
            lambda _gm, _inputs: programs[-1].forward,
            lambda _gm, _inputs: _boxed_backward(programs[-1]),
            partition,
            self.graph.device,
        )(module, inputs)

        def call(*args: Any) -> Any:
            outputs = compiled(*args)
            if programs:
                self._guard(programs[-1], args, outputs)
            return outputs

        return call

    def _find(self, raw: fx.GraphModule, num_forward_outputs: int) -> tuple[Region, RegionSchedule]:
        found = fingerprint(raw, num_forward_outputs)
        for region, schedule in zip(self.graph.regions, self.schedule.regions, strict=True):
            if region.managed and region.fingerprint == found:
                return region, schedule
        planned = ", ".join(r.fingerprint for r in self.graph.regions if r.managed)
        raise StalePlan(
            f"the graph that runs ({found}) is none of the planned ones ({planned}): the model, its train/eval "
            "flags, its hooks, the batch or torch changed since planning. The model is plain again; plan anew "
            "with gs.plan or gs.stow."
        )

    def _guard(self, program: RegionProgram, args: tuple[Any, ...], outputs: Any) -> None:
        """Let absent gradients be None, refuse double backward and changed tensors by name."""
        watched: list[_Watched] | None = None
        for node in compiled_nodes(outputs):
            if "gradstow_guarded" in node.metadata:
                continue
            if watched is None:
                watched = self._watch(program, args)
            node.metadata["gradstow_guarded"] = True
            node.set_materialize_grads(False)
            node.register_prehook(_Prehook(watched, self._name_of, self.graph.device))

    def _watch(self, program: RegionProgram, args: tuple[Any, ...]) -> list[_Watched]:
        return [
            _Watched(weakref.ref(args[i]), args[i]._version)
            for i in program.saved_inputs
            if isinstance(args[i], torch.Tensor)
        ]


class _Prehook:
    """Runs before a region's backward."""

    def __init__(self, watched: list[_Watched], name_of: Callable[[torch.Tensor], str], device: str) -> None:
        self.watched, self.name_of, self.device = watched, name_of, device

    def __call__(self, _gradients: Any) -> None:
        if torch.is_grad_enabled():
            raise CaptureError(_DOUBLE)
        if torch.is_autocast_enabled(self.device):
            raise CaptureError(_AUTOCAST)
        for item in self.watched:
            tensor = item.tensor()
            if tensor is not None and tensor._version != item.version:
                name = self.name_of(tensor)
                raise RuntimeError(_CHANGED.format(name=name, now=tensor._version, then=item.version))


def _boxed_backward(program: RegionProgram) -> Callable[[list[Any]], Any]:
    def run(args: list[Any]) -> Any:
        return program.run_backward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _for_aot(program: RegionProgram) -> fx.GraphModule:
    """The backward as AOTAutograd expects to see it: every tangent is an argument, arriving or not."""
    tangents = [n for n in program.raw.graph.find_nodes(op="placeholder") if "tangents" in n.name]
    lowered = program.lowered.backward
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    old = {n.name: n for n in lowered.graph.find_nodes(op="placeholder")}
    saved = [n for n in old.values() if "tangents" not in n.name]
    for node in saved + tangents:
        new = graph.placeholder(node.name)
        new.meta = dict(node.meta)
        if node.name in old:
            known[old[node.name]] = new
    output = graph.output(graph.graph_copy(lowered.graph, known))
    output.meta = dict(lowered.graph.output_node().meta)
    return fx.GraphModule(lowered, graph)


def inner_error(error: BaseException) -> BaseException:
    """What really went wrong, where Dynamo wrapped it."""
    while isinstance(error, torch._dynamo.exc.BackendCompilerFailed):
        error = error.inner_exception
    return error
