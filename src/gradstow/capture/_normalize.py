"""Bring a joint graph from AOTAutograd into the form that the IR describes.

Everything here keeps the numbers bit-equal to eager: aliases vanish, BatchNorm updates its statistics
itself again instead of through copies, and gradients that never arrive are taken out.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from gradstow.capture._layouts import real_layouts
from gradstow.capture._rerun import OutputRef, rerun_call
from gradstow.capture._tree import storage_key

aten = torch.ops.aten

_ALIASES = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
UNSURE = "unsure_layout"  # in the metadata of nodes that were traced for inputs of other strides than they get
_ADDS = {aten.add.Tensor}
# ops where one absent input does not make the whole result absent
_JOINS = {
    aten.cat.default,
    aten.stack.default,
    aten.where.self,
    aten.select_scatter.default,
    aten.slice_scatter.default,
    aten.copy.default,
    aten.index_put.default,
}


_LAZY = {aten._conj.default: aten._conj_physical.default, aten._neg_view.default: aten.neg.default}


def is_tangent(node: fx.Node) -> bool:
    return node.op == "placeholder" and "tangents" in str(node.target)


def normalize(joint: fx.GraphModule, arriving: Sequence[bool] | None = None, *, managed: bool = True) -> fx.GraphModule:
    """A normalised copy of ``joint``; ``arriving`` says which tangents arrive (all when None).

    The copy's nodes keep their metadata; the original is left alone. ``managed``: False for code that runs as plain
    PyTorch, so that no op may be another one.
    """
    module = copy_graph(joint)
    drop_aliases(module.graph)
    if managed:
        make_conjugates(module.graph)
    drop_clones(module.graph)
    if arriving is not None:
        drop_tangents(module.graph, arriving)
    lay_views(module.graph)
    restore_batch_norm(module.graph)
    module.graph.eliminate_dead_code()
    name_kept_outputs(module.graph)
    module.graph.lint()
    return module


def copy_graph(module: fx.GraphModule) -> fx.GraphModule:
    """A copy with nodes of its own that carry the same metadata."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    graph.output_node().meta = dict(module.graph.output_node().meta)
    return fx.GraphModule(module, graph)


def written(node: fx.Node) -> list[fx.Node]:
    """The inputs that the node changes in place."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    found = []
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        found += [n for n in (given if isinstance(given, (list, tuple)) else [given]) if isinstance(n, fx.Node)]
    return found


def drop_aliases(graph: fx.Graph) -> None:
    """``detach`` and ``alias`` mean nothing once autograd has been traced away."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _ALIASES:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def drop_clones(graph: fx.Graph) -> None:
    """A clone with its input's own layout is a copy that nobody can tell from the input (dropout at p = 0)."""
    given = {_memory(n) for n in graph.find_nodes(op="placeholder")}
    handed_out = {_memory(n) for n in graph.output_node().all_input_nodes}
    for node in graph.find_nodes(op="call_function", target=aten.clone.default):
        source = node.args[0]
        old, new = source.meta["val"], node.meta["val"]
        if _memory(source) in given or _memory(node) in handed_out or old.stride() != new.stride():
            continue
        if old.is_conj() or old.is_neg():  # the clone is no longer only marked as such, which some ops need
            continue
        if old.untyped_storage().nbytes() == new.untyped_storage().nbytes():
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _memory(node: fx.Node) -> Any:
    """What tells the memory of the node's value from that of others; None where it is no tensor."""
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    strided = isinstance(first, torch.Tensor) and first.layout is torch.strided
    return storage_key(first) if strided else None


def lay_views(graph: fx.Graph) -> None:
    """Let views whose base was replaced lie on what they now read, so that nobody takes their memory for their own."""
    for node in graph.nodes:
        if node.target is operator.getitem:
            made = node.args[0].meta["val"]
            if isinstance(made, (tuple, list)) and isinstance(node.meta.get("val"), torch.Tensor):
                node.meta = {**node.meta, "val": made[node.args[1]]}
        elif _returns_view(node) and _memory(node) not in map(_memory, node.all_input_nodes):
            _make_again(node)


def _make_again(node: fx.Node) -> None:
    """Let the node hold what its op makes of what it now reads."""
    mode = _fake_mode(node)
    assert mode is not None, "only fakes are traced"
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with mode, real_layouts():
        node.meta = {**node.meta, "val": node.target(*args, **kwargs)}


def _returns_view(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    aliases = [r.alias_info for r in node.target._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def make_conjugates(graph: fx.Graph) -> None:
    """A lazy conjugate that elementwise ops read is made by an op of its own.

    Each of them would make it anew, beside its result; so made, results are written over it. Other ops are left alone:
    some matrix products read lazy ones as they are, and what the rest makes anew is in their cost.
    """
    for target, made in _LAZY.items():
        for node in graph.find_nodes(op="call_function", target=target):
            kinds = [getattr(user.target, "tags", ()) for user in node.users]
            if isinstance(node.args[0], fx.Node) and kinds and all(torch.Tag.pointwise in tags for tags in kinds):
                node.target = made
                node.meta["val"] = torch.empty_like(node.args[0].meta["val"])


def restore_batch_norm(graph: fx.Graph) -> None:
    """Turn functional BatchNorm + two copies into the op that updates its statistics in place.

    In training mode the backward does not read the running statistics, so they are not kept for it.
    """
    for node in graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default):
        if node.args[7]:
            node.args = (*node.args[:3], None, None, *node.args[5:])
    for node in graph.find_nodes(op="call_function", target=aten._native_batch_norm_legit_functional.default):
        x, weight, bias, mean, var, training, momentum, eps = node.args
        getitems = {u.args[1]: u for u in node.users if u.target is operator.getitem}
        copies = [_only_copy(getitems.get(3), mean), _only_copy(getitems.get(4), var)]
        later = [u for s in (mean, var) for u in s.users if u is not node and u not in copies]
        if not training or None in copies or later:
            continue
        node.target = aten._native_batch_norm_legit.default
        node.meta["val"] = tuple(node.meta["val"][:3])
        for copy in copies:
            graph.erase_node(copy)
        for index in (3, 4):
            graph.erase_node(getitems[index])


def _only_copy(new: fx.Node | None, buffer: fx.Node) -> fx.Node | None:
    if new is None or len(new.users) != 1:
        return None
    (user,) = new.users
    fits = user.target is aten.copy_.default and user.args[0] is buffer and not user.users
    return user if fits else None


def name_kept_outputs(graph: fx.Graph) -> None:
    """Give a node to outputs that only a rerun reads (the statistics of a frozen BatchNorm), to keep them by."""
    for node in list(graph.nodes):
        call = rerun_call(node)
        named = {u.args[1] for u in node.users if u.target is operator.getitem}
        for argument in () if call is None else call.args:
            if isinstance(argument, OutputRef) and argument.index not in named:
                with graph.inserting_after(node):
                    output = graph.call_function(operator.getitem, (node, argument.index))
                output.meta = {**node.meta, "val": node.meta["val"][argument.index]}


def drop_tangents(graph: fx.Graph, arriving: Sequence[bool]) -> None:
    """Take out what hangs only on gradients that never arrive, as autograd itself would not run it."""
    tangents = [n for n in graph.nodes if is_tangent(n)]
    absent = {n for n, arrives in zip(tangents, arriving, strict=True) if not arrives}
    if not absent:
        return
    for node in list(graph.nodes):
        if node.op != "call_function" or not any(i in absent for i in node.all_input_nodes):
            continue
        if node.target in _ADDS and all(isinstance(a, fx.Node) for a in node.args[:2]):
            _drop_from_add(node, absent)
        elif node.target in _JOINS and not all(i in absent for i in node.all_input_nodes):
            _fill_with_zeros(graph, node, absent)
        else:
            absent.add(node)
    output = graph.output_node()
    output.args = (fx.node.map_arg(output.args[0], lambda n: None if n in absent else n),)
    graph.eliminate_dead_code()
    _spread_doubt(graph)
    _lay_out_again(graph)
    for node in tangents:
        if node in absent:
            graph.erase_node(node)


def _spread_doubt(graph: fx.Graph) -> None:
    """What reads a value of unsure layout has an unsure layout itself."""
    for node in graph.nodes:
        if node.op != "output" and any(UNSURE in source.meta for source in node.all_input_nodes):
            node.meta = {**node.meta, UNSURE: True}


def _lay_out_again(graph: fx.Graph) -> None:
    """Without what was dropped, results lie otherwise than when they were traced; views may then have to copy, as
    plain PyTorch's reshapes do."""
    for node in graph.nodes:
        mode = _fake_mode(node)
        if UNSURE not in node.meta or node.op != "call_function" or mode is None or _has_effects(node):
            continue
        if node.target is aten.view.default:
            with mode:
                fits = _can_view(node.args[0].meta["val"], node.args[1])
            node.target = node.target if fits else aten._reshape_copy.default
        _make_again(node)


def _can_view(value: torch.Tensor, size: list[int]) -> bool:
    try:
        value.view(size)
    except (RuntimeError, ValueError):
        return False
    return True


def _fake_mode(node: fx.Node) -> Any:
    values = node.meta.get("val")
    first = values[0] if isinstance(values, (tuple, list)) and values else values
    return getattr(first, "fake_mode", None)


def _has_effects(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _drop_from_add(node: fx.Node, absent: set[fx.Node]) -> None:
    rest = [a for a in node.args[:2] if a not in absent]
    same = len(rest) == 1 and rest[0].meta["val"].shape == node.meta["val"].shape
    if not rest:
        absent.add(node)
    elif same and node.kwargs.get("alpha", 1) == 1:
        for reader in node.users if rest[0].meta["val"].stride() != node.meta["val"].stride() else ():
            reader.meta = {**reader.meta, UNSURE: True}
        node.replace_all_uses_with(rest[0])
    else:
        _fill_with_zeros(node.graph, node, absent)


def _fill_with_zeros(graph: fx.Graph, node: fx.Node, absent: set[fx.Node]) -> None:
    for source in [i for i in node.all_input_nodes if i in absent]:
        value = source.meta["val"]
        with graph.inserting_before(node):
            zeros = graph.call_function(
                aten.zeros.default, (list(value.shape),), {"dtype": value.dtype, "device": value.device}
            )
        zeros.meta = {"val": value.new_zeros(value.shape), "partitioner_tag": "is_backward"}  # on memory of its own
        node.replace_input_with(source, zeros)
