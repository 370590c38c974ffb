"""Eager code generation: an FX graph becomes straight-line Python that frees at last use.

The generated function takes one list and empties it, so that nobody else holds the arguments; every
name is deleted right after its last use; an op that has a victim writes its result over that input. Where the graph
delivers gradients the function is a generator that yields them in a list, which the taker empties.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from gradstow.capture import boxed, overwriting_call
from gradstow.execute._lower import Victims, deliver

_LITERALS = (int, float, bool, str, type(None))


def generate(module: fx.GraphModule, victims: Victims) -> Callable[[list[Any]], Any]:
    """A boxed callable that runs ``module``'s graph. Its text is in ``.source`` for whoever wants to read it."""
    writer = _Writer(module, victims)
    source = writer.write()
    namespace: dict[str, Any] = dict(writer.names)
    exec(compile(source, "<gradstow region>", "exec"), namespace)
    call = boxed(namespace["run"])
    call.source = source  # type: ignore[attr-defined]
    return call


class _Writer:
    def __init__(self, module: fx.GraphModule, victims: Victims) -> None:
        self.module, self.victims = module, victims
        self.names: dict[str, Any] = {}
        self.ids: dict[int, str] = {}
        self.last: dict[fx.Node, fx.Node] = {}
        self.left: set[fx.Node] = set()  # delivered by the time that the function returns
        for node in module.graph.nodes:
            if node.target is deliver:
                self.left.update(node.args[1])
            for used in node.all_input_nodes:
                if node.op != "output" or used not in self.left:
                    self.last[used] = node
        self.dying: dict[fx.Node, list[fx.Node]] = {}
        for used, user in self.last.items():
            self.dying.setdefault(user, []).append(used)

    def write(self) -> str:
        nodes = list(self.module.graph.nodes)
        arguments = [n for n in nodes if n.op == "placeholder"]
        lines = ["def run(args):"]
        if arguments:
            lines.append(f"    {', '.join(n.name for n in arguments)}, = args")
        lines.append("    args.clear()")
        unused = [n.name for n in arguments if n not in self.last]
        if unused:
            lines.append(f"    del {', '.join(unused)}")
        for node in nodes:
            if node.op == "output":
                lines.append(f"    return {self._text(_without(node.args[0], self.left))}")
            elif node.target is deliver:
                lines += self._delivery(node)
            elif node.op != "placeholder":
                lines.append(f"    {self._statement(node)}")
                gone = [n.name for n in self.dying.get(node, [])]
                if node not in self.last:
                    gone.append(node.name)
                if gone:
                    lines.append(f"    del {', '.join(gone)}")
        return "\n".join(lines) + "\n"

    def _delivery(self, node: fx.Node) -> list[str]:
        positions, gradients = node.args
        pairs = ", ".join(f"({p}, {g.name})" for p, g in zip(positions, gradients, strict=True))
        gone = [n.name for n in self.dying.get(node, [])]
        return [f"    _left = [{pairs}]", *([f"    del {', '.join(gone)}"] if gone else []), "    yield _left"]

    def _statement(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            return f"{node.name} = {self._constant(_attribute(self.module, str(node.target)))}"
        if node.target is operator.getitem:
            return f"{node.name} = {node.args[0].name}[{node.args[1]!r}]"
        call = self._call(node.target, node.args, node.kwargs)
        victim = self.victims.get(node)
        if victim is None:
            return f"{node.name} = {call}"
        # fakes may be wrong about strides: then the op makes a result of its own, as plain PyTorch's does
        as_planned = f"{victim.name}.stride() == {tuple(victim.meta['val'].stride())}"
        return f"{node.name} = {self._call(*overwriting_call(node, victim))} if {as_planned} else {call}"

    def _call(self, target: Any, args: Any, kwargs: Any) -> str:
        parts = [self._text(a) for a in args] + [f"{k}={self._text(v)}" for k, v in kwargs.items()]
        return f"{self._constant(_callable(target))}({', '.join(parts)})"

    def _text(self, item: Any) -> str:
        if isinstance(item, fx.Node):
            return item.name
        if isinstance(item, (list, tuple)):
            inner = ", ".join(self._text(i) for i in item)
            if isinstance(item, list):
                return f"[{inner}]"
            return f"({inner},)" if item else "()"
        if type(item) in _LITERALS and not (isinstance(item, float) and repr(item) in ("inf", "-inf", "nan")):
            return repr(item)
        return self._constant(item)

    def _constant(self, item: Any) -> str:
        name = self.ids.get(id(item))
        if name is None:
            name = f"_c{len(self.names)}"
            self.ids[id(item)] = name
            self.names[name] = item
        return name


def _without(results: tuple[Any, ...], left: set[fx.Node]) -> tuple[Any, ...]:
    return tuple(None if isinstance(item, fx.Node) and item in left else item for item in results)


def _callable(target: Any) -> Any:
    """The overload's C++ entry where it has one: a third of the call's overhead."""
    return target._op if isinstance(target, torch._ops.OpOverload) else target


def _attribute(module: fx.GraphModule, path: str) -> Any:
    item: Any = module
    for part in path.split("."):
        item = getattr(item, part)
    return item
