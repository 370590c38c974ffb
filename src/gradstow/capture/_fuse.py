"""Group a joint graph into the kernels that a compiler will make of it.

A compiler such as Inductor gives no memory to a value that only elementwise code and reductions read: it computes it
inside the loops of its readers, those of the backward included. What has memory is *realized*: results of library
calls (matrix products, convolutions, attention, random numbers), what these read, results of reductions, and what the
graph hands out. Here, every realized value becomes one call of a ``Kernel``, which holds the code in between.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gradstow._signature import encode
from gradstow.capture._normalize import copy_graph, written
from gradstow.capture._tree import storage_key

aten = torch.ops.aten

# when a value with several readers is realized, after torch._inductor.config's limits
_MOST_READS, _MOST_OPS, _MOST_INPUTS = 4, 30, 8
_HEAVY = {"exp", "sigmoid", "tanh", "erf", "log", "pow"}
_LOOPS = {
    "clone", "_to_copy", "where", "full", "full_like", "zeros", "zeros_like", "ones", "ones_like", "empty", "arange",
    "scalar_tensor", "iota", "convert_element_type", "cat", "constant_pad_nd", "index", "gather", "embedding",
    "slice_scatter", "select_scatter", "flip", "roll", "repeat", "new_zeros", "new_full", "copy",
}  # fmt: skip
_COMPARISONS = {"le", "lt", "ge", "gt", "eq", "ne"}
_REDUCTIONS = {"sum", "mean", "var_mean", "var", "amax", "amin", "any", "all", "prod", "xor_sum"}


class Kernel:
    """Elementwise code and reductions that a compiler makes one loop of; called with its realized inputs."""

    __module__ = "gradstow"

    def __init__(self, graph: fx.Graph, ops: int) -> None:
        self.graph, self.ops = graph, ops
        self.__name__ = self.__qualname__ = "kernel"
        self._run: Any = None

    def __call__(self, *args: Any) -> Any:
        if self._run is None:
            self._run = fx.GraphModule({}, self.graph)
        return self._run(*args)

    def __repr__(self) -> str:
        return f"kernel of {self.ops} ops"

    def __deepcopy__(self, _memo: Any) -> Kernel:
        return self

    def overwritable(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The inputs whose memory its result may take over: read element by element, each only for its own place."""
        places = self.graph.find_nodes(op="placeholder")
        made = node.meta["val"]
        return tuple(a for a, place in zip(node.args, places, strict=True) if _same_place(place, made))

    def compares(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether what it makes of the input ``source`` of its call ``node`` is compared with something."""
        places = self.graph.find_nodes(op="placeholder")
        todo = [place for given, place in zip(node.args, places, strict=True) if given is source]
        seen: set[fx.Node] = set()
        while todo:
            each = todo.pop()
            if each not in seen:
                seen.add(each)
                todo += each.users
        return any(name_of(each) in _COMPARISONS for each in seen)

    def signature(self, node: fx.Node) -> str:
        """Its key in the cost table: what it reads, what it makes, how many ops it has."""
        made = node.meta["val"]
        return encode("gradstow.kernel", [val_of(a) for a in node.args], {"makes": made, "ops": self.ops})


def fuse(module: fx.GraphModule, changed: Collection[int] = ()) -> fx.GraphModule:
    """A copy of a normalised joint graph, in kernels. ``changed``: inputs that change before the backward runs."""
    module = copy_graph(module)
    realized = _Realized(module.graph, changed)
    result = _Grouped(module, realized).build()
    result.lint()
    return fx.GraphModule(module, result)


def expand(graph: fx.Graph) -> fx.Graph:
    """The graph with every kernel's own ops in its place."""
    new = fx.Graph()
    env: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if isinstance(node.target, Kernel):
            inner = dict(zip(node.target.graph.find_nodes(op="placeholder"), (env[a] for a in node.args), strict=True))
            env[node] = new.graph_copy(node.target.graph, inner)
        elif node.target is operator.getitem and isinstance(env[node.args[0]], tuple):
            env[node] = env[node.args[0]][node.args[1]]
        else:
            env[node] = new.node_copy(node, lambda n: env[n])
    return new


@dataclass(frozen=True, slots=True)
class _Weight:
    """What computing a value anew takes: tensors that are read, ops."""

    reads: frozenset[fx.Node]
    ops: int


class _Realized:
    """Which nodes of a graph have memory."""

    def __init__(self, graph: fx.Graph, changed: Collection[int]) -> None:
        self.graph = graph
        self.nodes: set[fx.Node] = set()
        inputs = graph.find_nodes(op="placeholder")
        late = {inputs[i] for i in changed} | {w for n in graph.nodes for w in written(n)}
        for node in graph.nodes:
            kind = kind_of(node)
            if kind == "other":
                self.nodes.add(node)
                for source in node.all_input_nodes:
                    self._demand(source)
            elif kind == "reduction" or any(source in late for source in node.all_input_nodes):
                self.nodes.add(node) if kind != "view" else self._demand(node)
        self._limit()

    def _demand(self, node: fx.Node) -> None:
        """Somebody reads it as a tensor in memory: it, or what it is a view of."""
        while kind_of(node) == "view" and node not in self.nodes:
            node = node.all_input_nodes[0]
        self.nodes.add(node)

    def _limit(self) -> None:
        """Realize what would be computed too often, or from too many places."""
        weights: dict[fx.Node, _Weight] = {}
        for node in self.graph.nodes:
            if node in self.nodes:
                weights[node] = _Weight(frozenset([node]), 0)
                continue
            below = [weights[i] for i in node.all_input_nodes]
            weight = _Weight(frozenset().union(*(w.reads for w in below)), 1 + sum(w.ops for w in below))
            again = len(node.users) > 1 and kind_of(node) == "loop"
            heavy = name_of(node) in _HEAVY
            often = again and (len(weight.reads) > _MOST_READS or weight.ops > _MOST_OPS or heavy)
            if kind_of(node) == "loop" and (often or len(weight.reads) > _MOST_INPUTS or weight.ops > 2 * _MOST_OPS):
                self.nodes.add(node)
                weight = _Weight(frozenset([node]), 0)
            weights[node] = weight


class _Grouped:
    """Builds the graph of kernels."""

    def __init__(self, module: fx.GraphModule, realized: _Realized) -> None:
        self.module, self.realized = module, realized.nodes
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}

    def build(self) -> fx.Graph:
        for node in self.module.graph.nodes:
            kind = kind_of(node)
            if node in self.realized and kind in ("loop", "reduction"):
                self._kernel(node)
            elif node in self.realized:
                self._copy(node)
        self.graph.output_node().meta = dict(self.module.graph.output_node().meta)
        return self.graph

    def _copy(self, node: fx.Node) -> None:
        self.env[node] = self.graph.node_copy(node, self._there)

    def _there(self, node: fx.Node) -> fx.Node:
        """The node in the new graph; views on realized values are made where they are asked for first."""
        if node not in self.env:
            assert kind_of(node) == "view", f"{node} is realized or a view"
            self._copy(node)
        return self.env[node]

    def _kernel(self, node: fx.Node) -> None:
        inside = _closure(node, self.realized)
        graph, env = fx.Graph(), {}
        sources = list(dict.fromkeys(s for n in inside for s in n.all_input_nodes if s not in inside))
        for source in sources:
            env[source] = graph.placeholder(source.name)
            env[source].meta = dict(source.meta)
        for each in inside:
            env[each] = graph.node_copy(each, lambda n: env[n])
        graph.output(env[node])
        made = self.graph.call_function(Kernel(graph, len(inside)), tuple(self._there(s) for s in sources))
        made._rename(node.name)
        made.meta = dict(node.meta)
        self.env[node] = made


def _closure(node: fx.Node, realized: set[fx.Node]) -> dict[fx.Node, None]:
    """The node and all that is computed inside its loop, in order."""
    found: dict[fx.Node, None] = {}
    stack: list[tuple[fx.Node, Iterator[fx.Node]]] = [(node, iter(node.all_input_nodes))]
    while stack:
        top, rest = stack[-1]
        for source in rest:
            if source not in realized and source not in found:
                stack.append((source, iter(source.all_input_nodes)))
                break
        else:
            found[top] = None
            stack.pop()
    return found


def kind_of(node: fx.Node) -> str:
    """ "view", "loop" (elementwise), "reduction", or "other"."""
    if node.op != "call_function" or node.target is operator.getitem:
        return "other"
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return "other"
    if torch.Tag.nondeterministic_seeded in target.tags or not isinstance(node.meta.get("val"), (torch.Tensor, tuple)):
        return "other"
    if _is_view(node):
        return "view"
    if name_of(node) in _REDUCTIONS:
        return "reduction"
    if target.namespace in ("aten", "prims") and (torch.Tag.pointwise in target.tags or name_of(node) in _LOOPS):
        return "loop"
    return "other"


def name_of(node: fx.Node) -> str:
    return node.target._schema.name.partition("::")[2] if isinstance(node.target, torch._ops.OpOverload) else ""


def _is_view(node: fx.Node) -> bool:
    val, first = node.meta["val"], node.args[0] if node.args else None
    source = first.meta.get("val") if isinstance(first, fx.Node) else None
    if not isinstance(val, torch.Tensor) or not isinstance(source, torch.Tensor):
        return False
    return storage_key(val) == storage_key(source)


def _same_place(place: fx.Node, made: Any) -> bool:
    val = place.meta.get("val")
    if not isinstance(val, torch.Tensor) or not isinstance(made, torch.Tensor):
        return False
    if (val.shape, val.stride(), val.dtype) != (made.shape, made.stride(), made.dtype):
        return False
    todo = list(place.users)
    while todo:
        reader = todo.pop()
        if reader.op == "output":
            continue
        pointwise = isinstance(reader.target, torch._ops.OpOverload) and torch.Tag.pointwise in reader.target.tags
        if not pointwise or reader.meta["val"].shape != made.shape:
            return False
        todo += reader.users
    return True


def val_of(item: Any) -> Any:
    return item.meta.get("val") if isinstance(item, fx.Node) else item
