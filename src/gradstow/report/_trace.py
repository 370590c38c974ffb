"""A profile as Chrome's trace events, for Perfetto and chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_MICRO = 1e6
_NAMES = {"plain": "plain PyTorch, predicted", "planned": "planned, predicted"}


def trace_json(profile: Mapping[str, Any]) -> dict[str, Any]:
    """One process per step: its ops, what travels beside them, and a counter of live bytes by parts.

    ``profile``: as ``profile_json`` makes it.
    """
    events = []
    for number, (name, timeline) in enumerate(profile["timelines"].items(), start=1):
        events.append(_about("process_name", number, 0, _NAMES[name]))
        events += [_about("thread_name", number, 1, "ops"), *_ops(number, timeline), *_levels(number, timeline)]
        travels = profile["plan"]["transfers"] if name == "planned" else ()
        if travels:
            events.append(_about("thread_name", number, 2, "transfers"))
        events += [_span(number, 2, _way(t), t["start"], t["end"], {"bytes": t["bytes"]}) for t in travels]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"versions": profile["plan"]["versions"]}}


def _about(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _ops(process: int, timeline: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    start = 0.0
    for end, nbytes, at in zip(timeline["seconds"], timeline["bytes"], timeline["at"], strict=True):
        yield _span(process, 1, timeline["texts"][at], start, end, {"live bytes": nbytes})
        start = end


def _levels(process: int, timeline: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    start = 0.0
    for index, end in enumerate(timeline["seconds"]):
        parts = {part: levels[index] for part, levels in timeline["parts"].items()}
        yield {"ph": "C", "name": "live bytes", "pid": process, "ts": start * _MICRO, "args": parts}
        start = end


def _span(process: int, thread: int, name: str, start: float, end: float, args: Mapping[str, Any]) -> dict[str, Any]:
    span = {"ph": "X", "name": name, "pid": process, "tid": thread}
    return {**span, "ts": start * _MICRO, "dur": (end - start) * _MICRO, "args": dict(args)}


def _way(transfer: Mapping[str, Any]) -> str:
    return f"{transfer['value']} {'back' if transfer['back'] else 'away'}"
