"""One graph input for every use, so that autograd adds up the gradients of the uses in eager's order.

Eager adds the gradients of all uses of a tensor one by one, the latest use first. A captured graph would add up those
of its own uses first, and autograd the sum to what came from later uses outside of the graph: another rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from gradstow.capture._normalize import copy_graph
from gradstow.capture._tree import storage_key

_NAMES = "dynamo_flat_name_to_original_fqn"  # Dynamo's names of the inputs, of which AOTAutograd wants all or none


def separate_uses(
    given: fx.GraphModule, inputs: Sequence[Any], leaves: bool
) -> tuple[fx.GraphModule, Callable[[Sequence[Any]], list[Any]] | None]:
    """The graph with an input per use of each tensor that gets a gradient, and what makes its arguments (None: as is).

    ``leaves``: whether parameters are separated too. A tensor that the graph changes in place stays one input.
    """
    module = copy_graph(given)
    module.meta = {k: v for k, v in module.meta.items() if k != _NAMES}
    graph = module.graph
    places = graph.find_nodes(op="placeholder")
    changed = _changed(graph)
    pairs = zip(places, inputs, strict=True)
    wanted = [p for p, x in pairs if _gets_gradient(x, leaves) and _storage(p) not in changed]
    twins: list[tuple[int, fx.Node]] = []
    for place in wanted:
        uses = _uses(place)
        for user, number in uses[1:]:
            with graph.inserting_after(places[-1] if not twins else twins[-1][1]):
                twin = graph.placeholder(f"{place.name}_use_{len(twins)}")
            twin.meta = dict(place.meta)
            _replace(user, place, number, twin)
            twins.append((places.index(place), twin))
    if not twins:
        return given, None
    module.recompile()
    origins = [position for position, _ in twins]
    first = set(origins)

    def expand(args: Sequence[Any]) -> list[Any]:
        """Views, made in the order of the uses: autograd runs them the other way round."""
        own = [a.view_as(a) if i in first else a for i, a in enumerate(args)]
        return own + [args[i].view_as(args[i]) for i in origins]

    return module, expand


def changed_inputs(module: fx.GraphModule) -> tuple[int, ...]:
    """Positions of the inputs that a graph of Dynamo's changes in place, also through views."""
    changed = _changed(module.graph) - {-1}
    return tuple(i for i, p in enumerate(module.graph.find_nodes(op="placeholder")) if _storage(p) in changed)


def _gets_gradient(item: Any, leaves: bool) -> bool:
    return isinstance(item, torch.Tensor) and item.requires_grad and (leaves or not item.is_leaf)


def _changed(graph: fx.Graph) -> set[int]:
    """Storages that ops of the graph change in place."""
    found = set()
    for node in graph.nodes:
        name = str(getattr(node.target, "__name__", node.target))
        in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")) or node.kwargs.get("inplace")
        if in_place or node.kwargs.get("out") is not None:
            found |= {_storage(n) for n in node.all_input_nodes}
    return found


def _storage(node: fx.Node) -> int:
    value = node.meta.get("example_value")
    strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return storage_key(value) if strided else -1


_IN_PLACE = {"setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"}


def _uses(place: fx.Node) -> list[tuple[fx.Node, int]]:
    """(user, number of the use in it) in the order in which their gradients come last to first."""
    found = []
    for user in sorted(u for u in place.users if u.op != "output"):
        count = _count(user, place)
        found += [(user, number) for number in reversed(range(count))]
    return found


def _count(user: fx.Node, place: fx.Node) -> int:
    seen: list[fx.Node] = []
    fx.node.map_arg((user.args, user.kwargs), lambda n: seen.append(n) if n is place else None)
    return len(seen)


def _replace(user: fx.Node, place: fx.Node, number: int, twin: fx.Node) -> None:
    """Put ``twin`` in the place of use ``number``, counted before any of the user's uses was replaced.

    Uses of one user are replaced from the last to the first, so that the numbers stay right.
    """
    seen = -1

    def change(node: fx.Node) -> fx.Node:
        nonlocal seen
        seen += node is place
        return twin if node is place and seen == number else node

    user.args, user.kwargs = fx.node.map_arg((user.args, user.kwargs), change)
