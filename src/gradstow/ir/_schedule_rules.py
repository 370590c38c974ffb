"""The rules for legal schedules, over one region's events as followed step by step.

Each rule may rely on those before it in ``SCHEDULE_RULES``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gradstow.ir._graph import Region, StorageKind
from gradstow.ir._graph_rules import op_name, value_name
from gradstow.ir._schedule import Deliver, Event, Free, RegionSchedule, Run


@dataclass(slots=True)
class _Step:
    """One event and what was there when it came.

    Attributes:
        again: a forward op that runs in the backward.
        absent: values that it reads and that are not there.
        gone: values that it reads of a storage that was given back.
        alive: whether the storage that it frees was there; the gradients, where it delivers some.
    """

    event: Event
    backward: bool
    again: bool = False
    absent: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    alive: bool = True


@dataclass(slots=True)
class Followed:
    """A region's events, followed: each step, and the values that are there after each part.

    ``held`` are storages of outputs that the caller holds while the backward runs.
    """

    region: Region
    held: set[int]
    plan: RegionSchedule
    steps: list[_Step]
    after_forward: set[int]
    after_backward: set[int]

    def runs(self, *, backward: bool) -> list[int]:
        return [s.event.op for s in self.steps if s.backward == backward and isinstance(s.event, Run)]

    def delivered(self) -> list[int]:
        return [p for s in self.steps if isinstance(s.event, Deliver) for p in s.event.gradients]


class _Part:
    """Values that are there while the forward or the backward of a region runs."""

    def __init__(self, region: Region, values: set[int], held: set[int], *, backward: bool) -> None:
        self.region, self.there, self.held, self.backward = region, values, held, backward
        self.storage = [v.storage for v in region.values]
        self.on: dict[int, list[int]] = {}
        for value, storage in enumerate(self.storage):
            self.on.setdefault(storage, []).append(value)
        self.alive = {self.storage[v] for v in values}
        self.freed: set[int] = set()

    def follow(self, event: Event) -> _Step:
        if isinstance(event, Deliver):
            return _Step(
                event, self.backward, alive=all(self.region.gradients[p] in self.there for p in event.gradients)
            )
        if isinstance(event, Free):
            step = _Step(event, self.backward, alive=event.storage in self.alive)
            self._free(event.storage)
            return step
        op = self.region.ops[event.op]
        again = self.backward and not op.backward
        inputs, outputs = op.inputs, op.outputs
        if again and op.rerun is not None:
            inputs, outputs = op.rerun.inputs, op.rerun.outputs
        missing = [v for v in inputs if v not in self.there]
        step = _Step(event, self.backward, again)
        step.gone = [v for v in missing if self.storage[v] in self.freed]
        step.absent = [v for v in missing if self.storage[v] not in self.freed]
        if event.reuse >= 0:
            self._free(self.storage[event.reuse])
        for v in outputs:
            if not (again and not op.view and self.storage[v] in self.held):  # beside what the caller holds: no use
                self.there.add(v)
            self.alive.add(self.storage[v])
            self.freed.discard(self.storage[v])
        return step

    def _free(self, storage: int) -> None:
        self.there.difference_update(self.on.get(storage, ()))
        self.alive.discard(storage)
        self.freed.add(storage)


def follow(region: Region, plan: RegionSchedule, held: set[int]) -> Followed:
    forward = _Part(region, set(region.inputs), set(), backward=False)
    steps = [forward.follow(event) for event in plan.forward]
    kept = set(plan.kept)
    backward = _Part(region, _at_backward_start(region, kept), held - kept, backward=True)
    steps += [backward.follow(event) for event in plan.backward]
    return Followed(region, held, plan, steps, forward.there, backward.there)


def _at_backward_start(region: Region, kept: set[int]) -> set[int]:
    """Tangents, inputs that are resident or kept, and of each kept storage the value that it was made as."""
    there = set(region.tangents)
    for v in region.inputs:
        storage = region.values[v].storage
        if storage in kept or region.storages[storage].kind is StorageKind.RESIDENT:
            there.add(v)
    for op in region.ops:
        if not op.backward and (not op.view or not op.inputs):
            there.update(v for v in op.outputs if region.values[v].storage in kept)
    return there


def broken_ids(region: Region, plan: RegionSchedule) -> Iterator[str]:
    storages = len(region.storages)
    for s in plan.kept:
        if not 0 <= s < storages:
            yield f"kept storage {s}"
    for event in (*plan.forward, *plan.backward):
        if isinstance(event, Run):
            legal = 0 <= event.op < len(region.ops) and -1 <= event.reuse < len(region.values)
        elif isinstance(event, Deliver):
            legal = all(0 <= p < len(region.gradients) for p in event.gradients)
        else:
            legal = 0 <= event.storage < storages
        if not legal:
            yield f"{event}"


def _order(f: Followed, *, backward: bool) -> Iterator[str]:
    ops = f.region.ops
    ran = [i for i in f.runs(backward=backward) if ops[i].backward == backward]
    chosen = {i for i in ran if ops[i].lazy}  # these may be left out
    expected = [
        i for i, op in enumerate(ops) if op.backward == backward and not op.view and (not op.lazy or i in chosen)
    ]
    real = [i for i in ran if not ops[i].view]
    for position, (got, want) in enumerate(zip(real, expected, strict=False)):
        if got != want:
            yield f"{op_name(f.region, got)}, run as number {position} in place of op {want},"
    for i in expected[len(real) :]:
        yield f"{op_name(f.region, i)}, which never runs,"
    for i in real[len(expected) :]:
        yield f"{op_name(f.region, i)}, which runs once more,"
    yield from _twice(f, backward=backward)


def _twice(f: Followed, *, backward: bool) -> Iterator[str]:
    """Views that run again though nothing was given back since."""
    seen: dict[int, int] = {}  # view → its storage
    for step in f.steps:
        if step.backward != backward:
            continue
        if isinstance(step.event, Free):
            seen = {i: s for i, s in seen.items() if s != step.event.storage}
        if not isinstance(step.event, Run):
            continue
        op = f.region.ops[step.event.op]
        if step.event.reuse >= 0:
            taken = f.region.values[step.event.reuse].storage
            seen = {i: s for i, s in seen.items() if s != taken}
        if op.view and step.event.op in seen:
            yield f"view {op_name(f.region, step.event.op)}, which runs twice,"
        elif op.view:
            seen[step.event.op] = f.region.values[op.outputs[0]].storage


def _forward_order(f: Followed) -> Iterator[str]:
    for i in f.runs(backward=False):
        if f.region.ops[i].backward:
            yield f"{op_name(f.region, i)} of the backward"
    yield from _order(f, backward=False)


def _backward_order(f: Followed) -> Iterator[str]:
    yield from _order(f, backward=True)


def _kept(f: Followed) -> Iterator[str]:
    made = {f.region.values[v].storage for v in f.after_forward}
    for position, s in enumerate(f.plan.kept):
        kind = f.region.storages[s].kind
        legal = kind in (StorageKind.ACTIVATION, StorageKind.BOUNDARY) and s in made
        if not legal or s in f.plan.kept[:position]:
            yield f"kept storage {s} ({kind.value})"


def _pinned(f: Followed) -> Iterator[str]:
    for step in f.steps:
        if step.again and isinstance(step.event, Run) and f.region.ops[step.event.op].pinned:
            yield f"{op_name(f.region, step.event.op)}, pinned because it {f.region.ops[step.event.op].pinned},"


def _unmanaged(f: Followed) -> Iterator[str]:
    for step in f.steps:
        if f.region.managed or not isinstance(step.event, Run):
            continue
        if (step.again and not f.region.ops[step.event.op].view) or step.event.reuse >= 0:
            yield f"{step.event}"


def _available(f: Followed) -> Iterator[str]:
    for step in f.steps:
        for v in step.absent:
            part = "backward" if step.backward else "forward"
            assert isinstance(step.event, Run)
            yield f"{op_name(f.region, step.event.op)}, which reads {value_name(f.region, v)} in the {part},"


def _not_freed(f: Followed) -> Iterator[str]:
    for step in f.steps:
        for v in step.gone:
            assert isinstance(step.event, Run)
            yield f"{op_name(f.region, step.event.op)}, which reads {value_name(f.region, v)},"


def _frees(f: Followed) -> Iterator[str]:
    own = {
        False: (StorageKind.ACTIVATION,),
        True: (StorageKind.ACTIVATION, StorageKind.BOUNDARY, StorageKind.GRADIENT, StorageKind.TANGENT),
    }
    for step in f.steps:
        if isinstance(step.event, Free):
            kind = f.region.storages[step.event.storage].kind
            if not step.alive or kind not in own[step.backward]:
                yield f"{step.event} ({kind.value}{'' if step.alive else ', not there'})"


def _scopes(f: Followed) -> Iterator[str]:
    region = f.region
    for backward in (False, True):
        steps = [s for s in f.steps if s.backward == backward]
        runs = [(i, region.ops[s.event.op]) for i, s in enumerate(steps) if isinstance(s.event, Run)]
        scoped = [(i, op) for i, op in runs if op.scope >= 0 and not op.view]
        ends = {op.scope: i for i, op in scoped}
        until = {region.values[v].storage: ends[op.scope] for _, op in scoped for v in (*op.inputs, *op.outputs)}
        for i, step in enumerate(steps):
            if isinstance(step.event, Free) and i < until.get(step.event.storage, i):
                yield f"{step.event}"


def _reuses(f: Followed) -> Iterator[str]:
    region = f.region
    outputs = {region.values[v].storage for v in region.outputs if v >= 0}
    gradients = {region.values[v].storage for v in region.gradients if v >= 0}
    kept = set(f.plan.kept)
    stay = {False: kept | outputs, True: kept | gradients | f.held}  # what was delivered belongs to autograd
    for step in f.steps:
        if not isinstance(step.event, Run) or step.event.reuse < 0:
            continue
        op, taken = region.ops[step.event.op], region.values[step.event.reuse].storage
        kind = region.storages[taken].kind
        allowed = step.event.reuse in op.overwrites and not (step.again and op.rerun is not None)
        own = kind is StorageKind.ACTIVATION or (step.backward and kind is StorageKind.GRADIENT)
        made = region.values[op.outputs[0]].storage if op.outputs else -1
        same = made >= 0 and region.storages[made].nbytes == region.storages[taken].nbytes
        fresh = not (step.backward and made in kept)
        if not (allowed and own and same and fresh) or taken in stay[step.backward]:
            yield f"{step.event} over storage {taken} ({kind.value})"


def _outputs(f: Followed) -> Iterator[str]:
    for v in f.region.outputs:
        if v >= 0 and v not in f.after_forward:
            yield f"output {value_name(f.region, v)}"


def _gradients(f: Followed) -> Iterator[str]:
    early = set(f.delivered())
    for position, v in enumerate(f.region.gradients):
        if v >= 0 and v not in f.after_backward and position not in early:
            yield f"gradient {value_name(f.region, v)}"


def _deliveries(f: Followed) -> Iterator[str]:
    delivered = f.delivered()
    for step in f.steps:
        if not isinstance(step.event, Deliver):
            continue
        own = all(f.region.added[p] and delivered.count(p) == 1 for p in step.event.gradients)
        if not (own and step.alive and step.backward and step.event.gradients):
            yield f"{step.event}"


def _applied(f: Followed) -> Iterator[str]:
    region = f.region
    changed: set[int] = set()
    for step in f.steps:
        if step.backward and isinstance(step.event, Run):
            op = region.ops[step.event.op]
            again = op.rerun if not op.backward else None
            read = {region.values[v].storage for v in (op.inputs if again is None else again.inputs)}
            if read & changed and not op.view:
                yield f"{op.name}"
        elif isinstance(step.event, Deliver) and region.applied:
            changed.update(
                region.values[region.inputs[p]].storage for p in step.event.gradients if region.applied[p] >= 0
            )


@dataclass(frozen=True, slots=True)
class ScheduleRule:
    """A sentence, and what checks it: ``broken`` yields the offenders."""

    says: str
    broken: Callable[[Followed], Iterator[str]]


SCHEDULE_RULES: dict[str, ScheduleRule] = {
    "forward-order": ScheduleRule("the forward runs its ops once in graph order, views where needed", _forward_order),
    "backward-order": ScheduleRule(
        "the backward runs its ops once in graph order, views where needed", _backward_order
    ),
    "pinned": ScheduleRule("a pinned op never runs in the backward", _pinned),
    "unmanaged": ScheduleRule("an unmanaged region reruns nothing and writes over nothing", _unmanaged),
    "use-after-free": ScheduleRule("no op reads a storage that was given back or taken over", _not_freed),
    "made-before-use": ScheduleRule(
        "an op reads what is there: made in this part, kept, resident or arrived", _available
    ),
    "frees": ScheduleRule("a storage is given back once, by the part that owns it", _frees),
    "scope": ScheduleRule("what ops of one scope read or make is given back after the last of them", _scopes),
    "reuse": ScheduleRule(
        "an op takes over only a storage of its own part, size and list that nobody else keeps", _reuses
    ),
    "kept": ScheduleRule("kept storages are activations or boundaries, there after the forward, named once", _kept),
    "outputs": ScheduleRule("outputs are there after the forward", _outputs),
    "deliveries": ScheduleRule(
        "a gradient that is added to a .grad may leave the backward once, when made", _deliveries
    ),
    "applied": ScheduleRule("no op reads a parameter after its gradient left to be applied", _applied),
    "gradients": ScheduleRule("gradients that were not delivered are there after the backward", _gradients),
}
