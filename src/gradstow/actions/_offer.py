"""What an action may do to a captured graph, and the tools that all of them share."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

SMALLEST = 1 << 12  # bytes of a value that is worth an op
LAYOUTS = "eager_input_vals"  # where a node's metadata has it


@dataclass(frozen=True, slots=True)
class Decode:
    """How the backward gets a value again that is never kept itself: ``target(*args)``, of its code."""

    code: str
    target: Any
    args: tuple[Any, ...]


@dataclass
class Offers:
    """A normalised joint graph, and what the actions put into it.

    Attributes:
        backward: the nodes of its backward part.
        outputs: what the forward hands out.
        lazy: nodes that were put in, which run in the forward only where somebody wants their result.
        sign: gives a node's key in the cost table.
        plain: backward node → what plain PyTorch's op reads, and its key, where the graph's own is another now.
        decodes: forward op → how its first output is made again.
    """

    graph: fx.Graph
    backward: set[fx.Node]
    outputs: Collection[Any]
    sign: Callable[[fx.Node], str]
    lazy: set[fx.Node] = field(default_factory=set)
    plain: dict[fx.Node, tuple[tuple[fx.Node, ...], str]] = field(default_factory=dict)
    decodes: dict[fx.Node, Decode] = field(default_factory=dict)

    def __post_init__(self) -> None:
        values = {n: n.meta.get("val") for n in self.graph.nodes}
        storages = {n: v.untyped_storage()._cdata for n, v in values.items() if isinstance(v, torch.Tensor)}
        self._lying = Counter(storages.values())
        self._makers: dict[int, fx.Node] = {}
        for node, storage in storages.items():
            self._makers.setdefault(storage, node)
        self._given = {storages[n] for n in self.outputs if n in storages}

    def forward_calls(self) -> list[fx.Node]:
        calls = [n for n in self.graph.nodes if n.op == "call_function"]
        return [n for n in calls if n not in self.backward and n not in self.lazy]

    def backward_calls(self, target: Any) -> list[fx.Node]:
        return [n for n in self.graph.find_nodes(op="call_function", target=target) if n in self.backward]

    def readers(self, node: fx.Node) -> list[fx.Node]:
        """The backward nodes that read the node itself."""
        return [user for user in node.users if user in self.backward]

    def op_of(self, node: fx.Node) -> fx.Node:
        """The op whose result the node holds."""
        source = node.args[0] if node.target is operator.getitem else node
        assert isinstance(source, fx.Node)
        return source

    def first_result(self, node: fx.Node) -> bool:
        """Whether the node holds the first result of its op: others are statistics, indices, states."""
        if node.target is operator.getitem:
            return bool(node.args[1] == 0)
        return not isinstance(node.meta.get("val"), (tuple, list))

    def replaceable(self, node: fx.Node) -> bool:
        """Whether the node is an op's first result, the whole of memory that is ours, and nothing stands for it yet."""
        value = node.meta.get("val")
        large = isinstance(value, torch.Tensor) and value.numel() * value.element_size() >= SMALLEST and dense(value)
        return large and self.first_result(node) and self.owns(node) and self.op_of(node) not in self.decodes

    def alone(self, node: fx.Node) -> bool:
        """Whether no other value lies on the node's memory and nobody outside is given it."""
        return node not in self.outputs and self._lying[node.meta["val"].untyped_storage()._cdata] == 1

    def owns(self, node: fx.Node) -> bool:
        """Whether the node's memory was made by its op in the forward, and nobody outside is given any of it."""
        storage = node.meta["val"].untyped_storage()._cdata
        return storage not in self._given and self._makers.get(storage) is node

    def call(self, after: fx.Node, target: Any, args: tuple[Any, ...], value: torch.Tensor) -> fx.Node:
        """A lazy op behind ``after``, in whose name it stands in reports.

        Its name says what it reads: where other gradients arrive than planned, what was kept is found by its name.
        """
        with self.graph.inserting_after(after):
            name = f"{args[0].name}_{target.__name__.partition('.')[0]}"
            node = self.graph.create_node("call_function", target, args, name=name)
        node.meta = {**after.meta, "val": value, "partitioner_tag": "is_forward", LAYOUTS: layouts(args)}
        self.lazy.add(node)
        return node

    def replace(self, reader: fx.Node, old: fx.Node, new: fx.Node) -> None:
        """Let a backward node read ``new`` in place of ``old``."""
        self.remember(reader)
        reader.replace_input_with(old, new)

    def remember(self, reader: fx.Node) -> None:
        """Note plain PyTorch's op, before it is changed."""
        if reader not in self.plain:
            self.plain[reader] = (tuple(reader.all_input_nodes), self.sign(reader))


class Action(ABC):
    """Something to do with a value beside keeping it and making it again by its own op.

    It is put into the graph as pure ops: one that makes something smaller of the value, and one that makes the value,
    or what stands for it, of that. Keeping the smaller thing and running the second op again in the backward is then
    the planner's usual choice, with its usual exact count of bytes and seconds.
    """

    name: str

    def apply(self, offers: Offers) -> None:
        """Put the ops in wherever the action fits."""
        for node in self.offer(offers):
            self.emit(offers, node)

    @abstractmethod
    def offer(self, offers: Offers) -> list[fx.Node]:
        """The nodes that the action fits."""

    @abstractmethod
    def emit(self, offers: Offers, node: fx.Node) -> None:
        """Put the ops in for one of them."""


class Replacement(Action):
    """Something kept in a value's place, of which alone the backward gets it again.

    Args:
        code: what is kept, or where.
        chosen: names of ops in the captured graph, some as ``"op>later"``.
    """

    def __init__(self, code: str, chosen: frozenset[str]) -> None:
        self.code = code
        self.until = {name: later for name, _, later in (text.partition(">") for text in chosen)}
        self.name = f"{code}@{','.join(sorted(chosen))}"

    def offer(self, offers: Offers) -> list[fx.Node]:
        nodes = [n for n in offers.forward_calls() if offers.op_of(n).name in self.until]
        return [n for n in nodes if offers.replaceable(n) and self.fits(n.meta["val"])]

    @abstractmethod
    def fits(self, value: torch.Tensor) -> bool:
        """Whether such a tensor, dense and the whole of its memory, can be replaced."""


def layouts(args: tuple[Any, ...]) -> tuple[Any, dict[str, Any]]:
    """What a compiler has to hand to an op of ours that goes by memory: arguments that lie like these."""
    return fx.node.map_arg(args, lambda n: n.meta["val"]), {}


def dense(value: torch.Tensor) -> bool:
    """Whether the value is its whole memory, each element once, in any order of dimensions."""
    pairs = sorted((stride, size) for stride, size in zip(value.stride(), value.shape, strict=True) if size != 1)
    expected = 1
    for stride, size in pairs:
        if stride != expected:
            return False
        expected *= size
    return bool(
        value.storage_offset() == 0 and value.untyped_storage().nbytes() == value.numel() * value.element_size()
    )
