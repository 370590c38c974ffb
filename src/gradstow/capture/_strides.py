"""The joint graph for gradients that arrive in another memory layout than AOTAutograd guessed.

AOTAutograd traces the backward for gradients laid out like the outputs, and copies what arrives otherwise. Eager does
not copy: kernels then sum in another order, and the last bits of the gradients differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, detect_fake_mode

from gradstow._errors import CaptureError
from gradstow.capture._normalize import is_tangent

aten = torch.ops.aten

Strides = tuple[tuple[int, ...] | None, ...]


def keep_layouts() -> None:
    """Called while AOTAutograd compiles: gradients then come to the backward as they arrive."""
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    for meta in () if metadata is None else metadata.subclass_tangent_meta:
        if type(meta).__name__ == "PlainTensorMeta":
            meta.memory_format = _AnyLayout()


class _AnyLayout:
    """Stands where AOTAutograd keeps the layout that it expects: equal to every size and stride."""

    memory_format = None

    @property
    def size(self) -> _Anything:
        return _Anything()

    @property
    def stride(self) -> _Anything:
        return _Anything()


class _Anything:
    def __eq__(self, _other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def expected_strides(joint: fx.GraphModule) -> Strides:
    """Strides of the gradients that the graph was traced for."""
    return tuple(_strides(n.meta["val"]) for n in joint.graph.find_nodes(op="placeholder") if is_tangent(n))


def arrived_strides(gradients: Sequence[Any], expected: Strides) -> Strides:
    """Strides of the gradients that are there; those that mean the same as expected are given as expected."""
    return tuple(
        want if g is None or want is None or _same(g, want) else tuple(g.stride())
        for g, want in zip(gradients, expected, strict=True)
    )


def restrided(joint: fx.GraphModule, strides: Strides) -> fx.GraphModule:
    """The joint graph as it is for gradients with these strides; nodes keep their names.

    Raises:
        CaptureError: an op of the backward does not take them.
    """
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    fresh: set[fx.Node] = set()  # nodes of the new graph whose layout may be another one
    wanted = iter(strides)
    for node in joint.graph.nodes:
        stride = next(wanted) if node.op == "placeholder" and is_tangent(node) else None
        if not any(known[i] in fresh for i in node.all_input_nodes) or node.op == "output":
            new = graph.node_copy(node, known.__getitem__)
            new.meta = dict(node.meta)
            if node.op == "get_attr":
                new.meta.setdefault("val", getattr(joint, str(node.target)))
            if stride is not None and stride != _strides(node.meta["val"]):
                new.meta["val"] = _laid_out(node.meta["val"], stride)
                fresh.add(new)
        else:
            new = _again(graph, node, known)
            fresh.add(new)
        known[node] = new
    graph.eliminate_dead_code()
    graph.lint()
    return fx.GraphModule(joint, graph)


def _again(graph: fx.Graph, node: fx.Node, known: dict[fx.Node, fx.Node]) -> fx.Node:
    """Copy a node that reads something with a new layout. What eager reshapes is a view where it can be."""
    source = node.all_input_nodes[0]
    try:
        if node.target is aten._unsafe_view.default and _is_contiguous_clone(source):
            inner = known[source].all_input_nodes[0]
            viewed = _try_view(inner.meta["val"], node.args[1])
            if viewed is not None:
                new = graph.create_node("call_function", aten.view.default, (inner, node.args[1]), name=node.name)
                new.meta = {**node.meta, "val": viewed}
                return new
        if node.target is aten.view.default and _try_view(known[source].meta["val"], node.args[1]) is None:
            clone = graph.call_function(
                aten.clone.default, (known[source],), {"memory_format": torch.contiguous_format}
            )
            clone.meta = {**node.meta, "val": _run(clone)}
            new = graph.create_node("call_function", aten._unsafe_view.default, (clone, node.args[1]), name=node.name)
        else:
            new = graph.node_copy(node, known.__getitem__)
        new.meta = dict(node.meta)
        new.meta["val"] = _run(new)
    except RuntimeError as error:
        raise CaptureError(
            f"a gradient arrived in another memory layout than the model's output has, and {node.name} ({node.target}) "
            f"does not take it: {error}. Make the output contiguous before the loss, or run the step under gs.plain()."
        ) from error
    return new


def _run(node: fx.Node) -> Any:
    mode: Any = detect_fake_mode([n.meta.get("val") for n in node.all_input_nodes])

    def value(source: fx.Node) -> Any:
        val = source.meta["val"]
        return mode.from_tensor(val) if isinstance(val, torch.Tensor) and not hasattr(val, "fake_mode") else val

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _try_view(val: torch.Tensor, size: Any) -> torch.Tensor | None:
    try:
        viewed: torch.Tensor = aten.view.default(val, size)
    except (RuntimeError, ValueError):
        return None
    return viewed


def _is_contiguous_clone(node: fx.Node) -> bool:
    return node.target is aten.clone.default and node.kwargs.get("memory_format") is torch.contiguous_format


def _laid_out(val: Any, stride: tuple[int, ...]) -> torch.Tensor:
    with val.fake_mode:
        return torch.empty_strided(tuple(val.shape), stride, dtype=val.dtype, device=val.device)


def _strides(val: Any) -> tuple[int, ...] | None:
    return tuple(int(s) for s in val.stride()) if isinstance(val, torch.Tensor) else None


def _same(gradient: torch.Tensor, stride: tuple[int, ...]) -> bool:
    """Whether the layouts are the same where a dimension has more than one element."""
    pairs = zip(gradient.shape, gradient.stride(), stride, strict=True)
    return gradient.numel() == 0 or all(have == want for size, have, want in pairs if size > 1)
