"""Small faults of a schedule, or of who follows one, and exact rules for whether they can show at all.

What shows is a replayer's account: which op runs at each moment, the bytes while and after it, those at the end.
``shows`` says so from the events alone, and ``breaks`` whether an event then comes before what it needs, so that the
spec must refuse it. They share no code with the replayers or the spec.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gradstow.ir import Deliver, Event, Free, Op, Run, Schedule, StepGraph, StorageKind, Timeline, just_in_time
from replayer import Ledger

Account = tuple[list[tuple[int, int, bool, bool, float]], list[int], list[int], int, int]


def account(timeline: Timeline) -> Account:
    """All that a replay says of the bytes, moment by moment."""
    names = [(m.region, m.op, m.backward, m.recompute, m.seconds) for m in timeline.moments]
    during, after = [m.during_bytes for m in timeline.moments], [m.after_bytes for m in timeline.moments]
    return names, during, after, timeline.end_bytes, timeline.peak_bytes


def expected(ledger: Ledger) -> Account:
    """The same by the second replayer, with the moments named from the schedule."""
    graph, costs, during = ledger.graph, ledger.costs, ledger.during()
    names = []
    parts = [(r, False) for r in range(len(graph.regions))]
    for r, backward in parts + [(r, True) for r, _ in reversed(parts)]:
        if (r, backward) == (len(parts) - 1, True) and graph.reserve_bytes:
            names.append((-1, -1, True, False, 0.0))
        for event in events(ledger.schedule, r, backward):
            if isinstance(event, Run):
                op = graph.regions[r].ops[event.op]
                again = backward and not op.backward
                cost = costs.rerun(op) if again else costs.plain(op) if ledger.plain else costs.run(op)
                names.append((r, event.op, backward, again, cost.seconds))
    return names, during, ledger.after(), ledger.end(), max(during, default=0)


def random_schedule(graph: StepGraph, chooser: random.Random, *, reuse: bool) -> Schedule:
    """Any kept sets; regions as the caller needs them: all of an unmanaged one, all outputs that he holds."""
    plans = []
    for region in graph.regions:
        everything = set(range(len(region.storages)))
        share = chooser.random()
        kept = {s for s in sorted(everything) if chooser.random() < share} if region.managed else everything
        if graph.outputs_held:
            kept |= {region.values[v].storage for v in region.outputs if v >= 0}
        plans.append(just_in_time(region, kept, reuse=reuse))
    return Schedule(tuple(plans))


def events(schedule: Schedule, r: int, backward: bool) -> tuple[Event, ...]:
    return schedule.regions[r].backward if backward else schedule.regions[r].forward


@dataclass(frozen=True)
class Dropped:
    """The Free or the Deliver at ``index`` of a region's part is forgotten."""

    region: int
    backward: bool
    index: int

    def schedule(self, schedule: Schedule) -> Schedule:
        found = events(schedule, self.region, self.backward)
        return _with(schedule, self, found[: self.index] + found[self.index + 1 :])

    def shows(self, graph: StepGraph, schedule: Schedule, plain: bool) -> bool:
        """The bytes stay until the part is over, where they go anyway: something must run before."""
        event, *later = events(schedule, self.region, self.backward)[self.index :]
        return isinstance(event, Free) and _counts(graph, schedule, self, event.storage, plain) and _runs(later)

    def breaks(self, graph: StepGraph, schedule: Schedule) -> bool:
        """A gradient that is given back and was not handed over is lost."""
        event, *later = events(schedule, self.region, self.backward)[self.index :]
        lost = _on(graph, self.region, _needs(graph, self, event))
        return any(isinstance(e, Free) and e.storage in lost for e in later)


@dataclass(frozen=True)
class Swapped:
    """The events at ``index`` and after it come in the other order."""

    region: int
    backward: bool
    index: int

    def schedule(self, schedule: Schedule) -> Schedule:
        found, i = events(schedule, self.region, self.backward), self.index
        return _with(schedule, self, (*found[:i], found[i + 1], found[i], *found[i + 2 :]))

    def shows(self, graph: StepGraph, schedule: Schedule, plain: bool) -> bool:
        """Two Runs are told apart by name, and a Free changes the bytes of the Run that it passes.

        But where this Run makes the storage, the Free comes too soon and gives nothing back: it is as if dropped.
        """
        first, second, *later = events(schedule, self.region, self.backward)[self.index :]
        if isinstance(first, Run) and isinstance(second, Run):
            return first != second
        if isinstance(first, Free) and isinstance(second, Run):
            return _counts(graph, schedule, self, first.storage, plain)
        if isinstance(first, Run) and isinstance(second, Free):
            counts = _counts(graph, schedule, self, second.storage, plain)
            return counts and (_runs(later) or _there(graph, schedule, self, second.storage))
        return False

    def breaks(self, graph: StepGraph, schedule: Schedule) -> bool:
        """The second event reads, frees or hands over what the first makes, or gives back what the first needs."""
        first, second = events(schedule, self.region, self.backward)[self.index : self.index + 2]
        if isinstance(second, Free) and second.storage in _on(graph, self.region, _needs(graph, self, first)):
            return True
        if not isinstance(first, Run):
            return False
        op, needs = graph.regions[self.region].ops[first.op], _needs(graph, self, second)
        if op.view:
            return not set(op.outputs).isdisjoint(needs)
        made = _made(graph, self.region, first, again=_again(self, op))
        touched = {second.storage} if isinstance(second, Free) else _on(graph, self.region, needs)
        return any(not _there(graph, schedule, self, s) for s in made & touched)


@dataclass(frozen=True)
class Shrunk:
    """A storage is taken to be a byte smaller than it is."""

    region: int
    storage: int

    def graph(self, graph: StepGraph) -> StepGraph:
        region = graph.regions[self.region]
        storages = list(region.storages)
        item = storages[self.storage]
        plain = item.plain_nbytes - 1 if item.plain_nbytes > 0 else item.plain_nbytes
        storages[self.storage] = replace(item, nbytes=max(item.nbytes - 1, 0), plain_nbytes=plain)
        regions = list(graph.regions)
        regions[self.region] = replace(region, storages=tuple(storages))
        return replace(graph, regions=tuple(regions))

    def shows(self, graph: StepGraph, schedule: Schedule, plain: bool) -> bool:
        """A storage counts where it was made, while the op runs that makes it; a tangent while any op runs."""
        region = graph.regions[self.region]
        if region.storages[self.storage].origin is not None or not _nbytes(graph, self.region, self.storage, plain):
            return False
        ran = [e for part in (False, True) for e in events(schedule, self.region, part) if isinstance(e, Run)]
        if any(self.storage in _made(graph, self.region, e, again=False) for e in ran):
            return True
        return self.storage in _on(graph, self.region, region.tangents) and self._lasts(graph, schedule)

    def _lasts(self, graph: StepGraph, schedule: Schedule) -> bool:
        """Whether a moment comes while a tangent is there, or it is there at the end."""
        region = graph.regions[self.region]
        running = [r for r in range(len(graph.regions)) if _runs(events(schedule, r, True))]
        until = self.region  # the lowest region whose backward it sees
        if self.region == len(graph.regions) - 1 and not graph.reserve_bytes:
            until = 0
        flags = zip(region.gradients, region.accumulated, region.added, region.inputs, strict=True)
        for value, ends_in_grad, added, given in flags:
            if value < 0 or region.values[value].storage != self.storage or added:
                continue
            origin = region.storages[region.values[given].storage].origin
            taker = self.region - 1 if origin is None else origin[0]
            if ends_in_grad or taker < 0:
                return True
            until = min(until, taker + 1)
        return any(until <= r <= self.region for r in running)


Fault = Dropped | Swapped


def faults(schedule: Schedule) -> Iterator[Fault]:
    """Every Free and every Deliver dropped, and every two neighbours swapped."""
    for r in range(len(schedule.regions)):
        for backward in (False, True):
            found = events(schedule, r, backward)
            yield from (Dropped(r, backward, i) for i, event in enumerate(found) if not isinstance(event, Run))
            yield from (Swapped(r, backward, i) for i in range(len(found) - 1))


def shrinkings(graph: StepGraph) -> Iterator[Shrunk]:
    for r, region in enumerate(graph.regions):
        yield from (Shrunk(r, s) for s, item in enumerate(region.storages) if item.nbytes)


def _with(schedule: Schedule, fault: Fault, changed: tuple[Event, ...]) -> Schedule:
    plans = list(schedule.regions)
    plan = plans[fault.region]
    plans[fault.region] = replace(plan, backward=changed) if fault.backward else replace(plan, forward=changed)
    return Schedule(tuple(plans))


def _runs(later: list[Event] | tuple[Event, ...]) -> bool:
    return any(isinstance(event, Run) for event in later)


def _key(graph: StepGraph, r: int, storage: int) -> tuple[int, int]:
    return graph.regions[r].storages[storage].origin or (r, storage)


def _nbytes(graph: StepGraph, r: int, storage: int, plain: bool) -> int:
    maker, there = _key(graph, r, storage)
    item = graph.regions[maker].storages[there]
    if item.kind is StorageKind.RESIDENT:
        return 0
    return item.plain_nbytes if plain and item.plain_nbytes >= 0 else item.nbytes


def _on(graph: StepGraph, r: int, values: tuple[int, ...]) -> set[int]:
    return {graph.regions[r].values[v].storage for v in values if v >= 0}


def _again(at: Fault, op: Op) -> bool:
    return at.backward and not op.backward


def _needs(graph: StepGraph, at: Fault, event: Event) -> tuple[int, ...]:
    """Values that a Run reads or a Deliver hands over."""
    region = graph.regions[at.region]
    if isinstance(event, Deliver):
        return tuple(region.gradients[p] for p in event.gradients)
    if isinstance(event, Free):
        return ()
    op = region.ops[event.op]
    return op.rerun.inputs if _again(at, op) and op.rerun is not None else op.inputs


def _made(graph: StepGraph, r: int, run: Run, *, again: bool) -> set[int]:
    op = graph.regions[r].ops[run.op]
    outputs = op.rerun.outputs if again and op.rerun is not None else op.outputs
    return _on(graph, r, outputs) - _on(graph, r, op.inputs)


def _counts(graph: StepGraph, schedule: Schedule, at: Fault, storage: int, plain: bool) -> bool:
    """Whether a Free of the part gives back bytes at all."""
    held = at.backward and _held_beside(graph, schedule, at.region, storage)
    return _nbytes(graph, at.region, storage, plain) > 0 and not held


def _held_beside(graph: StepGraph, schedule: Schedule, r: int, storage: int) -> bool:
    """Whether others hold a storage all the while that region r's backward runs."""
    if r == len(graph.regions) - 1 and not graph.reserve_bytes and storage in _on(graph, r, graph.regions[r].tangents):
        return True  # backward() holds the loss's gradient
    key = _key(graph, r, storage)
    for q, region in enumerate(graph.regions):
        here = {_key(graph, q, s): s for s in range(len(region.storages))}.get(key)
        if here is None:
            continue
        if q < r and here in schedule.regions[q].kept:
            return True
        read_later = any(
            key in {_key(graph, p, s) for s in _on(graph, p, graph.regions[p].inputs)}
            for p in range(q + 1, len(graph.regions))
        )
        if here in _on(graph, q, region.outputs) and (region.held or (graph.outputs_held and not read_later)):
            return True
    return False


def _there(graph: StepGraph, schedule: Schedule, at: Fault, storage: int) -> bool:
    """Whether a storage is there just before the event at ``at.index``."""
    region = graph.regions[at.region]
    there = at.backward and storage in {*schedule.regions[at.region].kept, *_on(graph, at.region, region.tangents)}
    for event in events(schedule, at.region, at.backward)[: at.index]:
        if isinstance(event, Free):
            there = there and event.storage != storage
        if isinstance(event, Run):
            if event.reuse >= 0:
                there = there and region.values[event.reuse].storage != storage
            again = _again(at, region.ops[event.op])
            there = there or storage in _made(graph, at.region, event, again=again)
    return there
