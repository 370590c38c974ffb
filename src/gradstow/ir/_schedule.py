"""What a planner decides: for each region the ordered events of its forward and its backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Run:
    """Run op ``op``. In the backward events a forward op is a recomputation.

    ``reuse`` is the input value whose dying storage the first output takes over, or -1.
    """

    op: int
    reuse: int = -1


@dataclass(frozen=True, slots=True)
class Free:
    """The storage's last use is over; its bytes are given back."""

    storage: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand gradients to autograd while the backward goes on; ``gradients`` are positions in the region's list.

    Autograd adds them to the ``.grad`` that is there. Their memory is given back by a Free.
    """

    gradients: tuple[int, ...]


Event = Run | Free | Deliver


@dataclass(frozen=True, slots=True)
class RegionSchedule:
    """The events of one region.

    Attributes:
        kept: storages that live from the forward to the backward.
        forward, backward: events in the order in which they happen.
    """

    kept: tuple[int, ...]
    forward: tuple[Event, ...]
    backward: tuple[Event, ...]

    def recomputed(self, forward_ops: frozenset[int]) -> tuple[int, ...]:
        """Ids of the forward ops that run again in the backward, in order."""
        return tuple(e.op for e in self.backward if isinstance(e, Run) and e.op in forward_ops)

    def to_json(self) -> dict[str, Any]:
        return {
            "kept": list(self.kept),
            "forward": [_pack(e) for e in self.forward],
            "backward": [_pack(e) for e in self.backward],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> RegionSchedule:
        return RegionSchedule(
            kept=tuple(data["kept"]),
            forward=tuple(_unpack(e) for e in data["forward"]),
            backward=tuple(_unpack(e) for e in data["backward"]),
        )


@dataclass(frozen=True, slots=True)
class Schedule:
    """A whole step: one RegionSchedule per region of the StepGraph, in the same order."""

    regions: tuple[RegionSchedule, ...]

    def to_json(self) -> list[dict[str, Any]]:
        return [r.to_json() for r in self.regions]

    @staticmethod
    def from_json(data: list[dict[str, Any]]) -> Schedule:
        return Schedule(tuple(RegionSchedule.from_json(r) for r in data))


def _pack(event: Event) -> list[Any]:
    if isinstance(event, Run):
        return ["run", event.op, event.reuse]
    if isinstance(event, Deliver):
        return ["deliver", *event.gradients]
    return ["free", event.storage]


def _unpack(data: list[Any]) -> Event:
    if data[0] == "run":
        return Run(int(data[1]), int(data[2]))
    if data[0] == "free":
        return Free(int(data[1]))
    if data[0] == "deliver":
        return Deliver(tuple(int(position) for position in data[1:]))
    raise ValueError(f"unknown event {data[0]!r}")
