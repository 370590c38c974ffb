"""Run a model's captured regions by their plan, inside the user's own training step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from gradstow._errors import CaptureError, warn_user
from gradstow.capture import (
    aot,
    call_module,
    changed_inputs,
    compile_settings,
    compiled_nodes,
    copy_graph,
    cut,
    fresh_function,
    is_whole_call,
    joint_passes,
    keep_layouts,
)
from gradstow.execute._eager import generate
from gradstow.execute._lower import deliver
from gradstow.execute._program import RegionProgram
from gradstow.execute._sources import Source
from gradstow.execute._stream import Handover
from gradstow.ir import GraphBreak

_MOST_TASKS = 8  # backwards that run at a time, at most
_CHANGED = (
    "{name} was changed in place between the forward and the backward that needs it (version {now}, "
    "expected {then}). Plain PyTorch refuses this wherever its backward reads it: change it after the backward, or on "
    "a clone."
)
_DOUBLE = (
    "create_graph=True asks for a backward of the backward, which a planned region does not have. "
    "Run this forward and backward under `with gs.plain():`, which gives plain PyTorch's numbers."
)
_AUTOCAST = (
    "the backward runs inside an autocast block, where plain PyTorch rounds some gradients otherwise than planned. "
    "Call backward after the `with torch.autocast(...)` block, as PyTorch recommends, or use `with gs.plain():`."
)


_SUMMED = (
    "gradstow: {name} is used several times in a model that ran several times before one backward. Its gradient is "
    "added up run by run, in another order than plain PyTorch's, so last bits may differ. Call backward after each "
    "forward, give all in one call, or run these steps under `with gs.plain():`."
)


@dataclass(frozen=True, slots=True)
class _Watched:
    tensor: weakref.ref[torch.Tensor]
    version: int


class Executor:
    """Calls a module so that its captured graphs run as ``source`` decides.

    Args:
        source: plans, or what records a step in order to plan it.
        name_of: names a tensor, for the messages.
        device: "cpu" or "cuda".

    Raises (when called):
        UnknownGraph: a graph turns up that was not planned.
        CaptureError: double backward.
    """

    def __init__(
        self, source: Source, name_of: Callable[[torch.Tensor], str], device: str, codegen: str = "eager"
    ) -> None:
        self.source, self.device, self.codegen = source, device, codegen
        self.programs: list[RegionProgram] = []
        self._name_of = name_of
        self.ran = 0  # planned graphs that ran in the last call
        self.said_summed = False
        self._begun = False  # whether anything of the model ran in it
        self._call = torch.compile(fresh_function(call_module), backend=self.compile, dynamic=False)

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        self._begun, self.ran = False, 0
        try:
            with compile_settings(self.source.told):
                return self._call(module, args, kwargs)
        except torch._dynamo.exc.TorchRuntimeError:  # an op refuses its inputs
            if self._begun:
                raise
            return module._call_impl(*args, **kwargs)  # with the op's own words

    def compile(self, module: fx.GraphModule, inputs: list[Any]) -> Any:
        """A graph of Dynamo's, as what runs it."""
        self._begun = self._begun or not is_whole_call(module)  # Python code of the model ran before it
        return cut(module, inputs, self._compile_part)

    def _compile_part(self, module: fx.GraphModule, inputs: list[Any], end: GraphBreak | None) -> Any:
        programs: list[RegionProgram] = []
        changed = changed_inputs(module)

        def partition(joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_kwargs: Any) -> Any:
            raw = copy_graph(joint_passes(joint) if self.codegen == "inductor" else joint)
            region, schedule = self.source.find(raw, num_fwd_outputs, begun=self._begun)
            program = RegionProgram(raw, num_fwd_outputs, region, schedule, generate, self.device, changed, end)
            programs.append(program)
            self.programs.append(program)
            return program.lowered.forward, _for_aot(program)

        def forward(_gm: fx.GraphModule, inputs: Any) -> Any:
            if self.codegen == "eager":
                keep_layouts()
            programs[-1].build_forward(inputs)
            return self.source.forward(programs[-1])

        def backward(gm: fx.GraphModule, inputs: Any) -> Any:
            programs[-1].build_backward(inputs, [n.name for n in gm.graph.find_nodes(op="placeholder")])
            return self.source.backward(programs[-1])

        compiled = aot(
            forward,
            backward,
            partition,
            self.device,
            self.codegen,
        )(module, inputs)

        if programs:
            self.source.check(programs[-1], begun=self._begun)

        def call(*args: Any) -> Any:
            self._begun = True
            if not programs:
                return compiled(*args)
            program = programs[-1]
            watched = self._watch(program, args)
            handover = Handover(program.groups) if program.groups and torch.is_grad_enabled() else None
            outputs = compiled(*(args if handover is None else handover.attach(args)))
            self.ran += 1
            self._guard(program, watched, _Sums(program, args, self), handover, outputs)
            return outputs

        return call

    def _guard(
        self, program: RegionProgram, watched: list[_Watched], sums: _Sums, handover: Handover | None, outputs: Any
    ) -> None:
        """Let absent gradients be None, refuse double backward and changed tensors by name."""
        for node in compiled_nodes(outputs):
            if "gradstow_guarded" not in node.metadata:
                node.metadata["gradstow_guarded"] = True
                node.set_materialize_grads(False)
                node.register_prehook(_Prehook(program, watched, sums, handover, self._name_of, self.device))

    def _watch(self, program: RegionProgram, args: tuple[Any, ...]) -> list[_Watched]:
        return [
            _Watched(weakref.ref(args[i]), args[i]._version)
            for i in program.saved_inputs
            if isinstance(args[i], torch.Tensor)
        ]


class _Sums:
    """Notices gradients that are added up in another order than plain PyTorch's.

    Autograd adds what each use brings to what is there; a region brings the sum of its own uses.
    """

    _tasks: ClassVar[dict[int, set[int]]] = {}  # running backward → parameters that a region has brought gradients of

    def __init__(self, program: RegionProgram, args: tuple[Any, ...], executor: Executor) -> None:
        self._several = {id(args[i]): weakref.ref(args[i]) for i, several in program.summed.items() if several}
        self._all = {id(args[i]) for i in program.summed}
        self._executor = weakref.ref(executor)

    def look(self, name_of: Callable[[torch.Tensor], str]) -> None:
        """A region's backward begins."""
        task = torch._C._current_graph_task_id()
        while len(self._tasks) > _MOST_TASKS:
            self._tasks.pop(next(iter(self._tasks)))
        before = self._tasks.setdefault(task, set())
        executor, found = self._executor(), [self._several[i]() for i in self._several.keys() & before]
        before |= self._all
        if found and executor is not None and not executor.said_summed and found[0] is not None:
            executor.said_summed = True
            warn_user(_SUMMED.format(name=name_of(found[0])))


class _Prehook:
    """Runs before a region's backward."""

    def __init__(
        self,
        program: RegionProgram,
        watched: list[_Watched],
        sums: _Sums,
        handover: Handover | None,
        name_of: Callable[[torch.Tensor], str],
        device: str,
    ) -> None:
        self.program, self.watched, self.handover, self.name_of = program, watched, handover, name_of
        self.sums = sums
        self.device = device

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
        self.sums.look(self.name_of)
        if self.handover is not None:
            self.handover.whole()
        self.program.current.handover = self.handover


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
    for node in [n for n in graph.nodes if n.target is deliver]:
        graph.erase_node(node)
    output.meta = dict(lowered.graph.output_node().meta)
    return fx.GraphModule(lowered, graph)


def inner_error(error: BaseException) -> BaseException:
    """What really went wrong, where Dynamo wrapped it."""
    while isinstance(error, torch._dynamo.exc.BackendCompilerFailed):
        error = error.inner_exception
    return error
