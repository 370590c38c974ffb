"""The life of the graph: losses that are kept with it, graphs that are retained for nothing, memory that grows."""

from __future__ import annotations

import gc
import linecache
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from gradstow._errors import warn_user
from gradstow._units import format_bytes
from gradstow.train._growth import Growth
from gradstow.train._holders import name_holder

_MARKED = 8  # nodes below the loss that are marked: the loss and the model's output are among them
_KEY = "gradstow_step"
_OLD = 2  # steps after which nobody needs a graph: a loop's own variable holds the last one
_WALKED = 20_000  # nodes looked at when something is wrong


class Watch:
    """Warns, once each, of what keeps more memory alive than training needs.

    - a loss, or an output, that still holds its graph two steps later, naming what holds it;
    - a graph that ``retain_graph=True`` kept although no second backward came;
    - memory that grows step by step, naming what holds the newest tensors.

    ``begin_step`` and ``end_step`` go around each step; warnings stand at the line outside of gradstow that led there.
    A step takes some ten microseconds. Graphs and the garbage collector's objects are walked only where something is
    suspicious, and graphs at steps 1, 2, 4, 8, ...
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._growth = Growth(model)
        self._step = 0
        self._kept: deque[tuple[int, weakref.ref[_Mark]]] = deque()
        self._retained: list[_Retained] = []
        self._look_at = 0  # the next step at which kept graphs are looked for
        self._pause = 1
        self._said: set[str] = set()

    def begin_step(self) -> None:
        """Before the forward."""
        self._step += 1
        self._look_for_kept()
        if self._retained:
            self._look_for_retained()
        grown = self._growth.look(self._step)
        if grown is not None and "growth" not in self._said:
            self._said.add("growth")
            warn_user(
                f"gradstow: memory grows by {format_bytes(grown.per_step)} each step: {grown.count} tensors more than "
                f"{grown.steps} steps ago, most of shape {grown.shape}"
                + (f", held by {grown.holder}. " if grown.holder else ". ")
                + "Drop them, or keep numbers: tensor.item(), or tensor.detach().cpu()."
            )

    def end_step(self, loss: Any) -> None:
        """After a backward: ``loss`` with its graph; anything else is left alone. Several per step are fine."""
        node = loss.grad_fn if isinstance(loss, torch.Tensor) else None
        if node is None:
            return
        if "kept" not in self._said:
            mark = _Mark()
            _put(mark, node)
            self._kept.append((self._step, weakref.ref(mark)))
        if "retained" not in self._said and self._step & (self._step - 1) == 0:  # steps 1, 2, 4, 8, ...
            self._retained += _retained(node, self._step)

    def _look_for_kept(self) -> None:
        while self._kept and self._kept[0][1]() is None:
            self._kept.popleft()
        if not self._kept or self._kept[0][0] > self._step - _OLD or self._step < self._look_at:
            return
        gc.collect()  # a cycle of garbage is no holder
        mark = self._kept[0][1]()
        if mark is None:
            self._pause *= 2
            self._look_at = self._step + self._pause
            return
        steps = sum(ref() is not None for _, ref in self._kept)
        self._kept.clear()
        self._said.add("kept")
        holder = _holder_of(mark)
        warn_user(
            "gradstow: a loss or an output is kept across steps with the graph that made it"
            + (f", by {holder}" if holder else "")
            + f"; the graphs of {steps} steps are alive. Keep the number: loss.item(), or loss.detach()."
        )

    def _look_for_retained(self) -> None:
        waiting = []
        for item in self._retained:
            if item.used:
                continue
            if item.alive and item.step > self._step - _OLD:
                waiting.append(item)
            elif "retained" not in self._said:
                self._said.add("retained")
                warn_user(
                    f"gradstow: a backward kept its graph ({format_bytes(item.nbytes)}), and no second backward came"
                    f"{_retaining_line()}. Leave retain_graph=True out of the last backward of each graph."
                )
        self._retained = [] if "retained" in self._said else waiting


class _Mark:
    """Lies in nodes of one step's graph, and lives as long as one of them."""


def _put(mark: _Mark, node: Any) -> None:
    for _ in range(_MARKED):
        node.metadata[_KEY] = mark
        node = next(_below(node), None)
        if node is None:
            return


def _below(node: Any) -> Iterator[Any]:
    """Without the nodes of leaves, which live as long as these where they have hooks."""
    return (n for n, _ in node.next_functions if n is not None and not hasattr(n, "variable"))


def _holder_of(mark: _Mark) -> str:
    """Of a tensor whose graph leads to the mark."""
    for item in gc.get_objects():
        node = _graph_of(item) if issubclass(type(item), torch.Tensor) else None
        if node is not None and _leads_to(node, mark):
            holder = name_holder(item)
            if holder:
                return holder
    return ""


def _graph_of(tensor: torch.Tensor) -> Any:
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view that was changed in a way that has no gradient
        return None


def _leads_to(node: Any, mark: _Mark) -> bool:
    todo, seen = [node], {node}
    while todo and len(seen) < _WALKED:
        node = todo.pop()
        if node.metadata.get(_KEY) is mark:
            return True
        new = set(_below(node)) - seen
        seen |= new
        todo += new
    return False


class _Retained:
    """A graph whose saved tensors outlived its step: whether a further backward came, and whether it is alive."""

    def __init__(self, node: Any, nbytes: int, step: int) -> None:
        self.nbytes, self.step, self.used = nbytes, step, False
        mark = _Mark()
        self._mark = weakref.ref(mark)
        node.register_prehook(_Used(self, mark))

    @property
    def alive(self) -> bool:
        return self._mark() is not None


class _Used:
    def __init__(self, owner: _Retained, mark: _Mark) -> None:
        self._owner, self._mark = owner, mark

    def __call__(self, _gradients: Any) -> None:
        self._owner.used = True


def _retained(root: Any, step: int) -> list[_Retained]:
    """The graph below ``root``, where all that it saved is still there.

    Of several losses on one graph the first ones' own parts stay, and what they share does not.
    """
    todo, seen = [root], {root}
    kept: dict[int, int] = {}
    deepest = None
    while todo and len(seen) < _WALKED:
        node = todo.pop()
        saved = _saved(node)
        if saved is None:
            return []
        if saved:
            deepest = node
            kept.update((t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in saved)
        new = set(_below(node)) - seen
        seen |= new
        todo += new
    return [] if deepest is None else [_Retained(deepest, sum(kept.values()), step)]


_SAVED_NAMES: dict[str, tuple[str, ...]] = {}


def _saved(node: Any) -> list[torch.Tensor] | None:
    """What the node keeps for the backward; None where that is given up."""
    kind = node.name()
    if kind not in _SAVED_NAMES:
        raw = [n.removeprefix("_raw") for n in dir(node) if n.startswith("_raw_saved_") and n != "_raw_saved_tensors"]
        _SAVED_NAMES[kind] = (*raw, *(("saved_tensors",) if hasattr(type(node), "saved_tensors") else ()))
    found: list[Any] = []
    try:
        for name in _SAVED_NAMES[kind]:
            value = getattr(node, name)
            found += value if isinstance(value, (list, tuple)) else [value]
    except RuntimeError:
        return None
    return [t for t in found if isinstance(t, torch.Tensor) and t.layout is torch.strided]


def _retaining_line() -> str:
    """Where the code that runs says so."""
    frame = sys._getframe(1) if hasattr(sys, "_getframe") else None
    while frame is not None:
        code, name = frame.f_code, str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if name not in ("gradstow", "torch"):
            last = max((line for _, _, line in code.co_lines() if line), default=0)
            for number in range(code.co_firstlineno, last + 1):
                if "retain_graph=True" in linecache.getline(code.co_filename, number).replace(" ", ""):
                    return f" ({code.co_filename}:{number})"
        frame = frame.f_back
    return ""
