"""Rehearse one training step on fake tensors and record every graph that AOTAutograd makes of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import default_partition
from torch.utils._pytree import tree_leaves

from gradstow.capture._backend import aot, boxed
from gradstow.capture._compiled import joint_passes
from gradstow.capture._cut import cut
from gradstow.capture._log import CompiledGraph, StepLog
from gradstow.capture._normalize import copy_graph, is_tangent
from gradstow.capture._uses import changed_inputs
from gradstow.ir import GraphBreak


class Recorder:
    """Compiles functions so that running them on fakes records their graphs, in the order of their forwards."""

    def __init__(self, parameters: Iterable[torch.Tensor], device: str, codegen: str = "eager") -> None:
        self.device, self.codegen = device, codegen
        self.log = StepLog(parameters)
        self.managed = True

    @contextlib.contextmanager
    def unmanaged(self) -> Iterator[None]:
        """Graphs compiled in here run as plain PyTorch in the real step."""
        self.managed = False
        try:
            yield
        finally:
            self.managed = True

    @property
    def compiled(self) -> bool:
        return self._codegen == "inductor"

    @property
    def _codegen(self) -> str:
        return self.codegen if self.managed else "eager"

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, backend=self._backend, dynamic=False)

    def _backend(self, module: fx.GraphModule, inputs: list[Any]) -> Any:
        return cut(module, inputs, self._compile_part)

    def _compile_part(self, module: fx.GraphModule, inputs: list[Any], end: GraphBreak | None) -> Any:
        graphs: list[CompiledGraph] = []
        changed = changed_inputs(module)

        def partition(joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_kwargs: Any) -> Any:
            joint = joint_passes(joint) if self.compiled else joint
            graphs.append(CompiledGraph(copy_graph(joint), num_fwd_outputs, self.managed, changed, end))
            return default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs)

        def forward(gm: fx.GraphModule, _inputs: list[Any]) -> Any:
            return boxed(lambda args: self.log.forward(graphs[-1], _boxed_call(gm), args))

        def backward(gm: fx.GraphModule, _inputs: list[Any]) -> Any:
            return boxed(lambda args: self._run_backward(graphs[-1], gm, args))

        compiled = aot(forward, backward, partition, self.device, self._codegen)(module, inputs)

        def call(*args: Any) -> Any:
            outputs = compiled(*args)
            let_gradients_be_absent(outputs)
            return outputs

        return call

    def _run_backward(self, graph: CompiledGraph, gm: fx.GraphModule, args: list[Any]) -> Any:
        places = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self.log.backward(graph, args, [a is not None for a, n in zip(args, places, strict=True) if is_tangent(n)])
        full = [_zeros(n) if a is None else a for a, n in zip(args, places, strict=True)]
        args.clear()
        return gm.forward(*full)


def _boxed_call(gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
    def call(args: list[Any]) -> Any:
        outputs = gm.forward(*args)
        args.clear()
        return outputs

    return call


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
