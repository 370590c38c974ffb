"""One cast for all uses of a tensor that plain autocast casts once.

Autocast keeps its short copy of a leaf until its outermost block ends, and all uses share that copy: autograd adds up
their gradients in the short type, and casts the sum. While AOTAutograd traces, autocast keeps nothing: each use would
have a cast of its own, and the sum would be made of long gradients. A cast in Dynamo's graph does what the kept copy
does, and autograd itself then finds the order of the sums.

What is shared is not guessed: the graph runs once on fakes with autocast's own cache, and is watched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradstow.capture._normalize import copy_graph, is_tangent

aten = torch.ops.aten
_SHORT = (torch.bfloat16, torch.float16)


def share_casts(given: fx.GraphModule, inputs: Sequence[Any], fake: Callable[[Any], Any]) -> fx.GraphModule:
    """The graph with a cast that is written out for each copy that autocast would keep and several uses would read.

    ``inputs``: the graph's, which say what is a leaf; ``fake`` makes fake tensors of them.
    """
    if not _autocasts(given.graph):
        return given
    module = copy_graph(given)
    places = module.graph.find_nodes(op="placeholder")
    cached = {p for p, x in zip(places, inputs, strict=True) if _may_be_kept(x)}
    if not any(_used_twice(p) for p in cached):
        return given
    shared = [c for c in _watch(module, cached, [fake(x) for x in inputs]) if sum(c.fitting.values()) > 1]
    for copy in shared:
        _write_out(module.graph, copy)
    if not shared:
        return given
    module.recompile()
    return module


def cast(value: torch.Tensor, dtype: torch.dtype, differentiable: bool) -> torch.Tensor:
    """A copy that autocast keeps is cast with gradients, also where a part without gradients is the first to ask."""
    with torch.set_grad_enabled(differentiable):
        return value.to(dtype)


def shortened(joint: fx.GraphModule, parameters: Sequence[int]) -> set[int]:
    """The parameters that a joint graph casts to a short type. ``parameters``: by input, -1 for other inputs."""
    places = [n for n in joint.graph.find_nodes(op="placeholder") if not is_tangent(n)]
    return {
        parameter
        for place, parameter in zip(places, parameters, strict=True)
        if parameter >= 0 and any(u.target is aten._to_copy.default and _is_short(u) for u in place.users)
    }


def _is_short(node: fx.Node) -> bool:
    return node.meta["val"].dtype in _SHORT


@dataclass(slots=True)
class _Copy:
    """A short copy that autocast made of an input."""

    place: fx.Node
    value: torch.Tensor
    reads: dict[fx.Node, int] = field(default_factory=dict)  # the nodes that read it and how often, the first one first
    fitting: dict[fx.Node, int] = field(default_factory=dict)  # those that can be handed it instead of the input


def _write_out(graph: fx.Graph, copy: _Copy) -> None:
    """Where plain PyTorch makes it: autograd takes the cast's gradient by when it ran."""
    first = next(iter(copy.reads))
    with graph.inserting_before(first):
        written = graph.call_function(cast, (copy.place, copy.value.dtype, copy.value.requires_grad))
    written.meta = {**first.meta, "example_value": copy.value}
    for node in copy.fitting:
        node.replace_input_with(copy.place, written)


def _autocasts(graph: fx.Graph) -> bool:
    enters = graph.find_nodes(op="call_function", target=torch.amp.autocast_mode._enter_autocast)
    return bool(enters) or torch._C._is_any_autocast_enabled()


def _may_be_kept(item: Any) -> bool:
    """Whether autocast keeps copies of it."""
    leaf = isinstance(item, torch.Tensor) and item.requires_grad and item.is_leaf and not item._is_view()
    return leaf and item.dtype == torch.float32 and item.layout is torch.strided


def _used_twice(place: fx.Node) -> bool:
    """Whether several uses are possible: by several nodes, by one node twice, or in the body of a higher-order op."""
    uses = [n for user in place.users for n in tree_leaves((user.args, user.kwargs)) if n is place]
    return len(uses) > 1 or any(_is_higher_order(user) for user in place.users)


def _is_higher_order(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def _is_opaque(node: fx.Node) -> bool:
    """Whether the gradient of what the node reads is not simply that of its ops: of the higher-order ops only
    checkpointing without another backward inside of the backward is as transparent as that."""
    checkpoint = node.target is torch.ops.higher_order.tag_activation_checkpoint
    return _is_higher_order(node) and not (checkpoint and node.kwargs.get("use_reentrant") is False)


def _watch(module: fx.GraphModule, cached: set[fx.Node], fakes: Sequence[Any]) -> list[_Copy]:
    """The copies that autocast keeps in a run of the graph."""
    mode: Any = torch._guards.detect_fake_mode(fakes)
    places = module.graph.find_nodes(op="placeholder")
    with mode:
        stand_ins = [_stand_in(fake, place in cached) for place, fake in zip(places, fakes, strict=True)]
    watch = _Watch({id(s): place for place, s in zip(places, stand_ins, strict=True) if place in cached})
    with mode, watch:
        _OnFakes(module, watch, mode).run(*stand_ins)
    return watch.found()


def _stand_in(fake: Any, cached: bool) -> Any:
    """What the run may change. Only what stands for a leaf is a leaf that gets a gradient."""
    if not isinstance(fake, torch.Tensor):
        return fake
    if not cached:
        return fake.detach()
    leaf = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    return leaf.requires_grad_()


class _OnFakes(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, watch: _Watch, mode: Any) -> None:
        super().__init__(module)
        self._watch, self._mode = watch, mode

    def run_node(self, n: fx.Node) -> Any:
        self._watch.node = n
        result = super().run_node(n)
        self._watch.forget(result)
        return result

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        item = super().get_attr(target, args, kwargs)
        return self._mode.from_tensor(item, static_shapes=True) if isinstance(item, torch.Tensor) else item


class _Watch(TorchDispatchMode):
    """Sees the ops that each node of Dynamo's graph runs, and what they read."""

    supports_higher_order_operators = True

    def __init__(self, leaves: dict[int, fx.Node]) -> None:
        super().__init__()
        self.node: fx.Node | None = None
        self._leaves = leaves
        self._copies: dict[int, _Copy] = {}
        self._otherwise: set[tuple[fx.Node | None, fx.Node]] = set()  # nodes that read more of an input than a copy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", "") == "prim":  # asks for the device, and reads nothing
            return result
        read = [id(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        for copy in (self._copies[i] for i in read if i in self._copies):
            copy.reads[self.node] = copy.reads.get(self.node, 0) + 1
        leaves = [self._leaves[i] for i in read if i in self._leaves]
        if func is aten._to_copy.default and leaves:
            self._copies[id(result)] = _Copy(leaves[0], result)
        else:
            self._otherwise |= {(self.node, leaf) for leaf in leaves}
        return result

    def forget(self, result: Any) -> None:
        """What a node returns is not autocast's, but a copy that the model asked for."""
        for item in tree_leaves(result):
            self._copies.pop(id(item), None)

    def found(self) -> list[_Copy]:
        copies = list(self._copies.values())
        seen = Counter((node, c.place) for c in copies for node in c.reads)
        for copy in copies:
            for node, count in copy.reads.items():
                key = (node, copy.place)
                if key not in self._otherwise and seen[key] == 1 and not _is_opaque(node):
                    copy.fitting[node] = count
        return copies
