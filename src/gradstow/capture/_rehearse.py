"""Rehearse one training step on fake tensors and record every graph that AOTAutograd makes of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import default_partition
from torch.utils._pytree import tree_leaves

from gradstow.capture._backend import aot, boxed
from gradstow.capture._normalize import copy_graph, is_tangent
from gradstow.capture._region import InputRole


@dataclass(frozen=True)
class CompiledGraph:
    """One graph that AOTAutograd made. A loop over blocks may run it many times in one step."""

    joint: fx.GraphModule
    num_forward_outputs: int
    managed: bool


@dataclass
class RegionRecord:
    """One run of a graph within the step."""

    compiled: CompiledGraph
    roles: list[InputRole]
    mask: list[bool] = field(default_factory=list)
    ran_backward: bool = False


class Recorder:
    """Compiles functions so that running them on fakes records their graphs, in the order of their forwards."""

    def __init__(self, parameters: Mapping[int, str], device: str) -> None:
        self.device = device
        self.order: list[RegionRecord] = []
        self._parameters = parameters  # storage key of every trainable parameter
        self._made: dict[int, tuple[int, int]] = {}  # storage key → (region, output) that made it
        self._saved_by: dict[int, int] = {}  # storage key → region whose forward made it
        self._alive: list[torch.Tensor] = []
        self.managed = True

    @contextlib.contextmanager
    def unmanaged(self) -> Iterator[None]:
        """Graphs compiled in here run as plain PyTorch in the real step."""
        self.managed = False
        try:
            yield
        finally:
            self.managed = True

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, backend=self._backend, dynamic=False)

    def _backend(self, module: fx.GraphModule, inputs: list[Any]) -> Any:
        graphs: list[CompiledGraph] = []

        def partition(joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_kwargs: Any) -> Any:
            graphs.append(CompiledGraph(copy_graph(joint), num_fwd_outputs, self.managed))
            return default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs)

        def forward(gm: fx.GraphModule, _inputs: list[Any]) -> Any:
            return boxed(lambda args: self._run_forward(graphs[-1], gm, args))

        def backward(gm: fx.GraphModule, _inputs: list[Any]) -> Any:
            return boxed(lambda args: self._run_backward(graphs[-1], gm, args))

        compiled = aot(forward, backward, partition, self.device)(module, inputs)

        def call(*args: Any) -> Any:
            outputs = compiled(*args)
            let_gradients_be_absent(outputs)
            return outputs

        return call

    def _run_forward(self, graph: CompiledGraph, gm: fx.GraphModule, args: list[Any]) -> Any:
        index = len(self.order)
        self.order.append(RegionRecord(graph, [self._role(a) for a in args]))
        outside = {storage_key(a) for a in args if isinstance(a, torch.Tensor)}
        outputs = gm.forward(*args)
        args.clear()
        for position, item in enumerate(outputs):
            if isinstance(item, torch.Tensor) and storage_key(item) not in outside:
                self._alive.append(item)
                self._saved_by[storage_key(item)] = index
                if position < graph.num_forward_outputs:
                    self._made.setdefault(storage_key(item), (index, position))
        return outputs

    def _run_backward(self, graph: CompiledGraph, gm: fx.GraphModule, args: list[Any]) -> Any:
        places = [n for n in gm.graph.nodes if n.op == "placeholder"]
        record = self._record_of(graph, args)
        record.ran_backward = True
        record.mask = [a is not None for a, n in zip(args, places, strict=True) if is_tangent(n)]
        full = [_zeros(n) if a is None else a for a, n in zip(args, places, strict=True)]
        args.clear()
        return gm.forward(*full)

    def _record_of(self, graph: CompiledGraph, args: list[Any]) -> RegionRecord:
        """The run whose backward this is: the one that saved these tensors, else the last one still open."""
        runs = [i for i, r in enumerate(self.order) if r.compiled is graph and not r.ran_backward]
        for argument in args:
            if isinstance(argument, torch.Tensor) and self._saved_by.get(storage_key(argument)) in runs:
                return self.order[self._saved_by[storage_key(argument)]]
        return self.order[runs[-1]]

    def _role(self, argument: Any) -> InputRole:
        if not isinstance(argument, torch.Tensor):
            return InputRole()
        key = storage_key(argument)
        if key in self._made:
            return InputRole(resident=False, origin=self._made[key])
        return InputRole(accumulates=key in self._parameters or (argument.is_leaf and argument.requires_grad))


def storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _zeros(node: fx.Node) -> torch.Tensor:
    val = node.meta["val"]
    return torch.zeros(val.shape, dtype=val.dtype, device=val.device)


def let_gradients_be_absent(outputs: Any) -> None:
    """Let the backward see None for outputs that got no gradient, where autograd would allocate zeros."""
    for node in compiled_nodes(outputs):
        node.set_materialize_grads(False)


def compiled_nodes(outputs: Any) -> list[Any]:
    """The autograd nodes of the captured graph that made ``outputs`` (views lie at most a few steps above)."""
    found: dict[int, Any] = {}
    todo = [(t.grad_fn, 0) for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    while todo:
        node, depth = todo.pop()
        if type(node).__name__ == "CompiledFunctionBackward":
            found[id(node)] = node
        elif depth < 4:
            todo += [(n, depth + 1) for n, _ in node.next_functions if n is not None]
    return list(found.values())
