"""The modules of a model as a tree with the bytes below each; equal layers of a list become one line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gradstow.report._snapshot import Held

_NAMED = 6  # of the names that one line stands for


@dataclass(frozen=True, slots=True)
class Node:
    """A module, or several equal ones of a list.

    Attributes:
        name: its own name; ``"*"`` for ``times`` equal ones with numbers for names.
        members: the names that ``"*"`` stands for, such as "0…11" or "0, 3, 6, 9".
        parts: bytes of each part of memory in it and below, all ``times`` together.
    """

    name: str
    path: str
    times: int
    parts: Mapping[str, int]
    children: tuple[Node, ...] = ()
    members: str = ""

    @property
    def nbytes(self) -> int:
        return sum(self.parts.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "path": self.path,
            "members": self.members,
            "times": self.times,
            "bytes": self.nbytes,
            "parts": dict(self.parts),
            "children": [child.to_json() for child in self.children],
        }


@dataclass(slots=True)
class _Branch:
    own: dict[str, int] = field(default_factory=dict)
    children: dict[str, _Branch] = field(default_factory=dict)

    def add(self, row: Held) -> None:
        self.own[row.part] = self.own.get(row.part, 0) + row.nbytes


def module_tree(rows: Iterable[Held]) -> Node:
    """The tree of all rows; the root has what belongs to no module, too."""
    root = _Branch()
    for row in rows:
        branch = root
        for name in row.module.split(".") if row.module else ():
            branch = branch.children.setdefault(name, _Branch())
        branch.add(row)
    return _node("", "", root)


def _node(name: str, path: str, branch: _Branch) -> Node:
    made = [_node(n, f"{path}.{n}" if path else n, child) for n, child in branch.children.items()]
    children = tuple(_repeated(made))
    parts = _sum([branch.own, *(child.parts for child in children)])
    return Node(name, path, 1, parts, children)


def _repeated(nodes: list[Node]) -> Iterable[Node]:
    """Siblings with numbers for names and the same bytes everywhere, as one."""
    groups: dict[object, list[Node]] = {}
    for node in nodes:
        key = _alike(node) if node.name.isdecimal() else node.name
        groups.setdefault(key, []).append(node)
    return [_together(group) if len(group) > 1 else group[0] for group in groups.values()]


def _alike(node: Node) -> object:
    children = tuple((child.name, child.times, _alike(child)) for child in node.children)
    return tuple(sorted(node.parts.items())), children


def _together(group: list[Node], name: str = "*") -> Node:
    first = group[0]
    path = ".".join([*first.path.split(".")[:-1], name])
    below = zip(*(node.children for node in group), strict=True)
    children = tuple(_joined(list(same)) for same in below)
    parts = _sum([node.parts for node in group])
    return Node(name, path, len(group), parts, children, _members([node.name for node in group]))


def _members(names: list[str]) -> str:
    """``["0", "1", "2"]`` → ``"0…2"``; of many others the first and the last."""
    numbers = sorted(int(name) for name in names)
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{numbers[0]}…{numbers[-1]}"
    if len(numbers) <= _NAMED:
        return ", ".join(map(str, numbers))
    return f"{', '.join(map(str, numbers[: _NAMED - 2]))} … {numbers[-1]}"


def _joined(same: list[Node]) -> Node:
    """The same child of equal parents: one line with the bytes of all."""
    below = zip(*(node.children for node in same), strict=True)
    children = tuple(_joined(list(child)) for child in below)
    first, times, parts = same[0], sum(node.times for node in same), _sum([node.parts for node in same])
    return Node(first.name, first.path, times, parts, children, first.members)


def _sum(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for one in parts:
        for part, nbytes in one.items():
            total[part] = total.get(part, 0) + nbytes
    return total
