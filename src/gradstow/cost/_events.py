"""Allocator events of torch's CPU allocator, read from a profiler session, and the level they add up to.

Facts about kineto that shape this file (torch 2.11 to 2.14, CPU):

- A second session cancels the first, silently in 2.14. So a running one is looked for before
  starting, and each of ours begins and ends with a tagged allocation that must come back.
- A block that was allocated before the session has no known size: its free gives no event. If an earlier
  session saw its address, the free gives an event with that earlier size, which may be another block's.
  So frees count only for addresses that were allocated in view.
- The plain event list has no addresses; the event tree has them, and a running total.
- Threads that the session's thread did not start through autograd are not in view.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.autograd.profiler

from gradstow._errors import GradstowError

_TAG_BYTES = 1
_MARK = "gradstow op number "


@dataclass(frozen=True, slots=True)
class Event:
    """One call of the allocator: ``nbytes`` is negative for a free; ``total`` is the profiler's own sum."""

    nanoseconds: int
    address: int
    nbytes: int
    total: int


@dataclass(slots=True)
class Level:
    """Live bytes of the blocks that were allocated in view."""

    now: int = 0
    peak: int = 0
    blocks: dict[int, int] = field(default_factory=dict)

    def apply(self, event: Event) -> None:
        """Count one event. An address that comes again was freed out of view: its old block is gone."""
        known = self.blocks.pop(event.address, 0)
        self.now -= known
        if event.nbytes > 0:
            self.blocks[event.address] = event.nbytes
            self.now += event.nbytes
            self.peak = max(self.peak, self.now)


class Session:
    """One profiler session that records CPU allocator events.

    Raises:
        GradstowError: on ``start`` where another profiler runs; on ``stop`` where events are missing.
    """

    def __init__(self) -> None:
        self._profiler: Any = None

    def start(self) -> None:
        refuse_running_profiler()
        # kineto reads it once, at its first session: without it each session writes lines to stderr
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        profile: Any = torch.autograd.profiler.profile
        self._profiler = profile(profile_memory=True)
        self._profiler.__enter__()
        _tag()

    def stop(self) -> Recording:
        _tag()
        profiler, self._profiler = self._profiler, None
        try:
            profiler.__exit__(None, None, None)
        except RuntimeError as error:  # torch 2.11 raises where 2.14 gives an empty result
            raise _cut_short(0) from error
        roots = profiler.kineto_results.experimental_event_tree()
        events = _events_of(roots)
        return Recording(tuple(roots), _checked(events), events[0].nanoseconds)


@dataclass(frozen=True, slots=True)
class Recording:
    """What a session saw: the event tree, all allocator events in time order, its start in nanoseconds."""

    roots: tuple[Any, ...]
    events: tuple[Event, ...]
    started: int

    def marked(self) -> Iterator[tuple[int, tuple[Event, ...]]]:
        """The events under each ``mark(index)``, in time order."""
        for node in _walk(self.roots):
            if node.name.startswith(_MARK):
                yield int(node.name.removeprefix(_MARK)), _events_of(node.children)


def mark(index: int) -> Any:
    """A context manager: what is allocated inside is found again under ``index``."""
    return torch.autograd.profiler.record_function(f"{_MARK}{index}")


def refuse_running_profiler() -> None:
    """Raise where a torch profiler is running: starting ours would silently empty both."""
    # The one private name in this room: torch has no public question for this.
    if torch.autograd.profiler._is_profiler_enabled:
        raise GradstowError(
            "a torch profiler is already running, and torch can run only one at a time: a second would "
            "silently empty both. Stop the other profiler first, or measure outside of it."
        )


def _tag() -> None:
    torch.empty(_TAG_BYTES, dtype=torch.uint8, device="cpu")


def _walk(roots: Iterable[Any]) -> Iterator[Any]:
    stack = list(roots)[::-1]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children[::-1])


def _events_of(roots: Iterable[Any]) -> tuple[Event, ...]:
    found = []
    for node in _walk(roots):
        if node.name != "[memory]":
            continue
        fields = node.extra_fields
        if fields.device.type == "cpu":
            found.append(Event(node.start_time_ns, fields.ptr, fields.alloc_size, fields.total_allocated))
    return tuple(sorted(found, key=lambda event: event.nanoseconds))


def _checked(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """The events between the tags, once it is sure that both tags and everything between are there."""
    if len(events) < 4 or not (_is_tag(events[:2]) and _is_tag(events[-2:])):
        raise _cut_short(len(events))
    between = events[2:-2]
    moved = events[-3].total - events[1].total
    if sum(event.nbytes for event in between) != moved:
        raise GradstowError(
            f"the memory measurement lost allocator events: they add up to "
            f"{sum(event.nbytes for event in between)} bytes where the allocator's own sum moved by {moved}. "
            "Measure again, with less in the measured block and no other thread allocating."
        )
    return between


def _cut_short(events: int) -> GradstowError:
    return GradstowError(
        f"the memory measurement was cut short ({events} allocator events came back): another torch "
        "profiler was started or stopped while it ran. Remove that profiler from the measured code."
    )


def _is_tag(pair: tuple[Event, ...]) -> bool:
    made, freed = pair
    return (made.nbytes, freed.nbytes) == (_TAG_BYTES, -_TAG_BYTES) and made.address == freed.address
