"""Why graphs end, and where: Dynamo's graph breaks and our own cuts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from torch import fx
from torch._dynamo.utils import counters, graph_break_reasons

from gradstow.capture._backend import call_module
from gradstow.capture._places import user_frame
from gradstow.ir import GraphBreak


class Listener:
    """Hears of cuts, and looks up Dynamo's own record of why graphs end.

    Attributes:
        cuts: where graphs were cut.
        calls: for every call of a fused kernel outside of a graph its signature for the cost table, and the bytes
            that autograd shows it to keep (which are not all).
    """

    def __init__(self) -> None:
        self.cuts: list[GraphBreak] = []
        self.calls: list[tuple[str, int]] = []
        self._counted, self._placed = dict(counters["graph_break"]), list(graph_break_reasons)

    def breaks(self) -> tuple[GraphBreak, ...]:
        """The graph breaks so far: those with a source line first."""
        found = [_of(reason) for reason in graph_break_reasons if not any(reason is old for old in self._placed)]
        known = {b.reason for b in found}
        new = [r for r, times in counters["graph_break"].items() if times > self._counted.get(r, 0)]
        found += [GraphBreak(_first_line(str(r)), "") for r in new if _first_line(str(r)) not in known]
        return tuple(dict.fromkeys(found + self.cuts))


listener: ContextVar[Listener | None] = ContextVar("gradstow_listener", default=None)


@contextlib.contextmanager
def listen() -> Iterator[Listener]:
    """Hear of the graph breaks and cuts inside."""
    heard = Listener()
    token = listener.set(heard)
    try:
        yield heard
    finally:
        listener.reset(token)


def end_of(module: fx.GraphModule) -> GraphBreak | None:
    """The graph break that ended a graph of Dynamo's, or None where the function ended."""
    reason = getattr(module, "compile_subgraph_reason", None)
    return _of(reason) if reason is not None and reason.graph_break else None


def is_whole_call(module: fx.GraphModule) -> bool:
    """Whether a graph of Dynamo's is that of the model's whole call, so that nothing of it has run before."""
    stack: Any = getattr(getattr(module, "compile_subgraph_reason", None), "user_stack", None)
    code = call_module.__code__
    return bool(stack) and (stack[0].filename, stack[0].name) == (code.co_filename, code.co_name)


def _of(reason: Any) -> GraphBreak:
    return GraphBreak(reason=_first_line(reason.reason), source=user_frame(reason.user_stack))


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else "unknown"
