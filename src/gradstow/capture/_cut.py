"""Ops that no captured graph may hold: Dynamo's graph is cut around them, and they run as plain PyTorch."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from gradstow._signature import encode
from gradstow.capture._breaks import end_of, is_whole_call, listener
from gradstow.capture._casts import share_casts
from gradstow.capture._normalize import copy_graph
from gradstow.capture._outside import saved_after
from gradstow.capture._places import module_path, user_line
from gradstow.capture._uses import separate_uses
from gradstow.ir import GraphBreak

Compile = Callable[[fx.GraphModule, list[Any], GraphBreak | None], Callable[..., Any]]

_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
_CELLS = {torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell}
_BY_DATA = {torch.prod, "prod"}
# where the flag for sparse gradients and the padding index stand, and what no padding is
_LOOKUPS = {
    torch.nn.functional.embedding: (6, 2, None),
    torch.nn.functional.embedding_bag: (7, 10, None),
    torch.embedding: (4, 2, -1),
    torch.embedding_bag: (5, 8, None),
}


def cut(module: fx.GraphModule, inputs: list[Any], compile_graph: Compile) -> Callable[..., Any]:
    """Compile a graph of Dynamo's, in parts where it holds what no captured graph may hold.

    ``compile_graph`` gets a part, its inputs and the graph break that ends it, if one does.
    """
    why, end = _reasons(module), end_of(module)
    mode: Any = torch._guards.detect_fake_mode(inputs)

    def compile_part(part: fx.GraphModule, given: list[Any], end: GraphBreak | None) -> Callable[..., Any]:
        part = share_casts(part, given, functools.partial(_fake, mode))
        part, expand = separate_uses(part, given, leaves=bool(why) or not is_whole_call(module))
        if expand is None:
            return compile_graph(part, given, end)
        with torch.enable_grad():
            compiled = compile_graph(part, expand([_fake(mode, item) for item in given]), end)

        def call(*args: Any) -> Any:
            return compiled(*expand(args))

        return call

    if not why:
        return compile_part(module, inputs, end)
    number, numbers, outside = -1, {}, set()
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if number < 0 or (node in why) != (number in outside):
            number += 1
            if node in why:
                outside.add(number)
        numbers[node] = number
    cuts = {node: _break(node, reason) for node, reason in why.items() if node.target is not operator.getitem}
    _note(cuts.values())
    ends = {f"submod_{numbers[node] - 1}": found for node, found in reversed(cuts.items())}  # the first one ends it
    parts = split_module(module, None, lambda n: numbers[n], keep_original_order=True)
    return _compile_parts(
        parts, [_fake(mode, item) for item in inputs], {f"submod_{i}" for i in outside}, ends, end, compile_part
    )


def _compile_parts(
    parts: fx.GraphModule,
    inputs: list[Any],
    outside: set[str],
    ends: dict[str, GraphBreak],
    end: GraphBreak | None,
    compile_part: Compile,
) -> Callable[..., Any]:
    """Run the parts on Dynamo's fakes one after the other, which shows each what it really gets, and compile them."""
    places = parts.graph.find_nodes(op="placeholder")
    env = dict(zip(places, inputs, strict=True))
    for node in list(parts.graph.nodes):
        if node.op == "get_attr":
            env[node] = getattr(parts, node.target)
        elif node.target is operator.getitem:
            env[node] = env[node.args[0]][node.args[1]]
        elif node.op == "call_module":
            part, given = getattr(parts, node.target), [env[a] for a in node.args]
            with torch._guards.detect_fake_mode(inputs) or contextlib.nullcontext(), torch.enable_grad():
                env[node] = part(*given)
            if node.target in outside:
                run = _plainly(part, given)
            else:
                run = _compile_part(part, given, ends.get(node.target, end), compile_part)
            node.op, node.target = "call_function", run
    parts.recompile()
    return parts.forward


def _fake(mode: Any, item: Any) -> Any:
    """The fake that AOTAutograd will take for it, too."""
    if not isinstance(item, torch.Tensor) or getattr(item, "fake_mode", None) is mode:
        return item
    return mode.from_tensor(item, static_shapes=True)


def _compile_part(
    part: fx.GraphModule, inputs: list[Any], end: GraphBreak | None, compile_part: Compile
) -> Callable[..., Any]:
    """AOTAutograd wants a tuple, also of one output."""
    output = part.graph.output_node()
    if isinstance(output.args[0], (tuple, list)):
        return compile_part(part, inputs, end)
    output.args = ((output.args[0],),)
    part.recompile()
    compiled = compile_part(part, inputs, end)

    def only(*args: Any) -> Any:
        return compiled(*args)[0]

    return only


def _plainly(part: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    signatures = _signatures(part, inputs)
    on_fakes = _without_padding(part)

    def run(*args: Any) -> Any:
        fake = any(isinstance(a, torch._subclasses.FakeTensor) for a in args)
        outputs = (on_fakes if fake else part).forward(*args)
        heard = listener.get()
        if heard is not None and signatures:
            kept = saved_after(outputs, args)
            heard.calls += [(text, kept // len(signatures)) for text in signatures]
        return outputs

    return run


def _without_padding(part: fx.GraphModule) -> fx.GraphModule:
    """Which rows of a sparse gradient padding takes away is not known on fakes: there all stay."""
    twin = copy_graph(part)
    for node in twin.graph.nodes:
        if node.target in _LOOKUPS:
            position, nothing = _LOOKUPS[node.target][1:]
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != "padding_idx"}
            if position < len(node.args):
                node.args = (*node.args[:position], nothing, *node.args[position + 1 :])
    twin.recompile()
    return twin


def _signatures(part: fx.GraphModule, inputs: list[Any]) -> list[str]:
    """Calls of recurrent modules as ``gradstow::recurrent_step``; those on packed sequences have no fused kernel."""
    places = part.graph.find_nodes(op="placeholder")
    values = dict(zip(places, inputs, strict=True))
    found = []
    for node in part.graph.nodes:
        if node.target in _RECURRENT and isinstance(node.args[3], bool):
            args = fx.node.map_arg(node.args, lambda n: values.get(n, n.meta.get("example_value")))
            x, states, weights, *options = args
            states = list(states) if isinstance(states, (tuple, list)) else [states]
            call = (str(node.target.__name__), x, states, list(weights), *options)
            found.append(encode("gradstow.recurrent_step.default", call, {}))
    return [text for text in found if text]


def _note(breaks: Iterable[GraphBreak]) -> None:
    heard = listener.get()
    if heard is not None:
        heard.cuts += breaks


def _reasons(module: fx.GraphModule) -> dict[fx.Node, str]:
    """The nodes that have to run as plain PyTorch, and why. What unpacks their results goes with them."""
    found: dict[fx.Node, str] = {}
    for node in module.graph.nodes:
        why = _reason(module, node)
        if node.target is operator.getitem and node.args[0] in found and not _is_tensor(node.args[0]):
            why = found[node.args[0]]
        if why:
            found[node] = why
    return found


def _reason(module: fx.GraphModule, node: fx.Node) -> str:
    if node.op == "call_function" and node.target in _RECURRENT:
        return "its fused kernel has no captured form with the same numbers"
    if node.op == "call_function" and node.target in _CELLS:
        return (
            "it works in place on parts of a matrix, and captured on copies of them, which its kernels round otherwise"
        )
    if node.target in _BY_DATA and _reads_gradients(node):
        return "plain PyTorch chooses the formula of its gradient by the data, and a captured graph holds one of them"
    if node.op in ("call_function", "call_method") and _is_sparse(node):
        return "a captured graph holds no sparse tensors and gradients"
    if _changes_an_input(node):
        return "its custom function changes an input of the graph in place, whose gradient the captured form loses"
    bodies = [getattr(module, str(n.target)) for n in node.all_input_nodes if n.op == "get_attr"]
    for body in bodies:  # of a higher-order op such as torch's own checkpointing
        if isinstance(body, fx.GraphModule):
            inner = _reasons(body)
            if inner:
                return next(iter(inner.values()))
    return ""


def _changes_an_input(node: fx.Node) -> bool:
    """Whether this is a custom function that marks an input of the whole graph as changed."""
    places = [node.args[2 + i] for i in node.kwargs.get("dirty_idx") or () if isinstance(i, int)]
    return any(isinstance(place, fx.Node) and place.op == "placeholder" for place in places)


def _reads_gradients(node: fx.Node) -> bool:
    values = [n.meta.get("example_value") for n in node.all_input_nodes]
    return any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)


def _is_sparse(node: fx.Node) -> bool:
    if node.target in _LOOKUPS:
        return _sparse_lookup(node)
    values = [n.meta.get("example_value") for n in (node, *node.all_input_nodes)]
    return any(isinstance(v, torch.Tensor) and v.layout is not torch.strided for v in values)


def _sparse_lookup(node: fx.Node) -> bool:
    position = _LOOKUPS[node.target][0]
    given = node.args[position] if position < len(node.args) else node.kwargs.get("sparse", False)
    return bool(given)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def _break(node: fx.Node, reason: str) -> GraphBreak:
    name = str(getattr(node.target, "__name__", node.target))
    path = module_path(node).removeprefix("module").strip(".")
    where = f" of {path}" if path else ""
    return GraphBreak(reason=f"{name}{where} runs as plain PyTorch: {reason}", source=user_line(node))
