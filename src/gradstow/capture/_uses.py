"""One graph input for each use of a value that comes from an earlier graph.

Autograd adds up a value's gradients one by one, the last use first. Where a graph uses a value twice and a later
graph uses it, too, a sum of its own inside the first graph would bracket them otherwise: other last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext

Spread = Callable[[tuple[Any, ...]], tuple[Any, ...]]


def one_input_per_use(module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[Any], Spread]:
    """The graph from Dynamo with an input for each use of a value that has a history; leaves are as they were.

    Returns the graph, its example inputs, and what makes its arguments of the original ones. The new inputs come
    last, in the order of their uses.
    """
    sources: list[int] = []
    places = list(module.graph.find_nodes(op="placeholder"))
    uses: list[tuple[int, fx.Node]] = []
    for index, (place, given) in enumerate(zip(places, inputs, strict=True)):
        calls = [user for user in place.users if user.op in ("call_function", "call_method")]
        if _has_history(given) and not any(_writes(user) for user in calls):
            uses += [(index, user) for user in calls[1:]]
    if not uses:
        return module, list(inputs), lambda args: args
    twin = _copy(module)
    order = {node.name: number for number, node in enumerate(twin.graph.nodes)}
    by_name = {node.name: node for node in twin.graph.nodes}
    anchor = by_name[places[-1].name]
    for index, user in sorted(uses, key=lambda item: order[item[1].name]):
        place, reader = by_name[places[index].name], by_name[user.name]
        with twin.graph.inserting_after(anchor):
            anchor = twin.graph.placeholder(f"{place.name}_again_{len(sources)}")
        anchor.meta, anchor._dynamo_source = dict(place.meta), None
        reader.replace_input_with(place, anchor)
        sources.append(index)
    twin.recompile()

    again = set(sources)

    def spread(args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Each use gets a view of its own, the first one, too: autograd goes back through views, the last one first."""
        first = [arg.view_as(arg) if index in again else arg for index, arg in enumerate(args)]
        return (*first, *(args[index].view_as(args[index]) for index in sources))

    given = [_fake(item) if index in again else item for index, item in enumerate(inputs)]
    given = list(spread(tuple(given)))
    return twin, given, spread


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, known))
    graph.output_node().meta = dict(module.graph.output_node().meta)
    for place in module.graph.find_nodes(op="placeholder"):
        known[place]._dynamo_source = getattr(place, "_dynamo_source", None)
    twin = fx.GraphModule(module, graph)
    twin.meta = dict(module.meta)
    return twin


def _fake(given: torch.Tensor) -> torch.Tensor:
    """The example that AOTAutograd traces with; sizes of a tensor that Dynamo has not seen would be free."""
    context = TracingContext.try_get()
    mode: Any = None if context is None else context.fake_mode
    if mode is None or hasattr(given, "fake_mode"):
        return given
    made: torch.Tensor = mode.from_tensor(given, static_shapes=True)
    return made


def _has_history(given: Any) -> bool:
    return isinstance(given, torch.Tensor) and given.requires_grad and not given.is_leaf


def _writes(user: fx.Node) -> bool:
    """Whether the call may change its input in place."""
    name = user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")
    return (
        "out" in user.kwargs or user.kwargs.get("inplace") is True or (name.endswith("_") and not name.endswith("__"))
    )
