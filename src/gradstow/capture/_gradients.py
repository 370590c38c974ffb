"""Gradients as their ``.grad`` will have them: a copy that autograd would make of one becomes an op of the graph.

Autograd takes a first gradient as it comes, except where it lies otherwise than its parameter or somebody else holds
it, too: then it copies. A region hands its gradients over together, so all those copies would be made at once, beside
their originals and after the plan. In the graph each is made as soon as it can be, and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import fx

from gradstow.capture._normalize import is_tangent

aten = torch.ops.aten


class _Role(Protocol):
    @property
    def accumulates(self) -> bool: ...
    @property
    def added(self) -> bool: ...


def copy_gradients(graph: fx.Graph, num_outputs: int, roles: Sequence[_Role]) -> None:
    """Put the copies of first gradients into the joint graph, in their parameters' layouts."""
    output = graph.output_node()
    results: list[Any] = list(output.args[0])
    primals = [n for n in graph.find_nodes(op="placeholder") if not is_tangent(n)]
    gradients = results[num_outputs:]
    first = [role.accumulates and not role.added for role in roles]
    for position, (gradient, primal) in enumerate(zip(gradients, primals, strict=True)):
        if not (first[position] and isinstance(gradient, fx.Node) and _comparable(gradient, primal)):
            continue
        others = [p for p, other in enumerate(gradients) if other is gradient and p != position]
        shared = any(p > position or not first[p] for p in others)  # the last one of all may be taken
        if shared or not _lies_like(gradient, primal):
            results[num_outputs + position] = _copy(graph, output, gradient, primal)
    output.args = (results,)


def _comparable(gradient: fx.Node, primal: fx.Node) -> bool:
    value, parameter = gradient.meta.get("val"), primal.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(parameter, torch.Tensor):
        return False
    strided = value.layout is torch.strided and parameter.layout is torch.strided
    return strided and value.shape == parameter.shape and value.dtype == parameter.dtype


def _lies_like(gradient: fx.Node, primal: fx.Node) -> bool:
    """Autograd's condition for taking it: the parameter's strides, where that is dense, else contiguous."""
    value, parameter = gradient.meta["val"], primal.meta["val"]
    if not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return bool(value.is_contiguous())
    pairs = zip(value.shape, value.stride(), parameter.stride(), strict=True)
    return value.numel() == 0 or all(have == want for size, have, want in pairs if size != 1)


def _copy(graph: fx.Graph, output: fx.Node, gradient: fx.Node, primal: fx.Node) -> fx.Node:
    parameter = primal.meta["val"]
    dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
    dims = range(parameter.dim())
    order = sorted(dims, key=lambda d: (-parameter.stride(d), d)) if dense else list(dims)
    with graph.inserting_before(output):
        source = gradient if order == list(dims) else _call(graph, gradient, aten.permute.default, (gradient, order))
        contiguous = {"memory_format": torch.contiguous_format}
        copy = _call(graph, gradient, aten.clone.default, (source,), contiguous)
        if order == list(dims):
            return copy
        return _call(graph, gradient, aten.permute.default, (copy, [order.index(d) for d in dims]))


def _call(graph: fx.Graph, gradient: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> fx.Node:
    node = graph.call_function(target, args, kwargs or {})
    value = target(*fx.node.map_arg(args, lambda n: n.meta["val"]), **(kwargs or {}))
    node.meta = {**gradient.meta, "val": value, "seq_nr": None, "partitioner_tag": "is_backward"}
    return node
