"""Walk a schedule's events and count live bytes: the simulated memory of the whole step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradstow.ir._cost import CostTable
from gradstow.ir._deliver import applying
from gradstow.ir._graph import Op, Region, StepGraph, StorageKind
from gradstow.ir._schedule import Deliver, Event, Free, Run, Schedule


@dataclass(frozen=True, slots=True)
class Moment:
    """One op running: live bytes while it runs and after it, above what was resident."""

    region: int
    op: int
    backward: bool
    recompute: bool
    during_bytes: int
    after_bytes: int
    seconds: float
    wait: float = 0.0  # seconds before it for what it reads and what is still on its way


@dataclass(frozen=True, slots=True)
class Transfer:
    """A value on its way to another place or back, in seconds from the start of the step."""

    region: int
    op: int
    back: bool
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Life:
    """A storage that is alive from one moment to another, both included; made again, it has another life.

    ``last`` is the number of moments where it outlives the step.
    """

    region: int
    storage: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Every moment of the step in order; all bytes are above what was resident at its start.

    Attributes:
        lives: when each storage that is not resident is alive, in order of their first moments.
        end_bytes: alive after the backward: gradients, and outputs that the caller holds.
        transfers: what travels beside the ops, one after the other.
    """

    moments: tuple[Moment, ...]
    lives: tuple[Life, ...]
    end_bytes: int
    transfers: tuple[Transfer, ...] = ()

    @property
    def peak_bytes(self) -> int:
        return max((m.during_bytes for m in self.moments), default=0)

    @property
    def peak_index(self) -> int:
        return max(range(len(self.moments)), key=lambda i: self.moments[i].during_bytes, default=-1)

    def alive(self, index: int) -> tuple[Life, ...]:
        """What is alive at a moment."""
        return tuple(life for life in self.lives if life.first <= index <= life.last)

    @property
    def seconds(self) -> float:
        return sum(m.seconds + m.wait for m in self.moments)

    @property
    def wait_seconds(self) -> float:
        """What ops wait for transfers."""
        return sum(m.wait for m in self.moments)

    @property
    def recompute_seconds(self) -> float:
        return sum(m.seconds for m in self.moments if m.recompute)


def replay(graph: StepGraph, schedule: Schedule, costs: CostTable, *, plain: bool = False) -> Timeline:
    """The timeline of running ``schedule``.

    Bytes at a Run are what is alive before it, plus the outputs that it makes, plus the op's working
    memory; the peak is taken with the new outputs counted. Resident storages count nothing. A held
    region's outputs live to the end; what lies between regions to the end of its last reader's forward;
    other outputs to the end where the caller holds outputs, else to the end of the forwards. The gradient
    of a boundary lives until the backward of the region that made the boundary starts, where the tangents
    take over; those of the loss live to the end, since ``backward()`` itself holds them. What is delivered
    is added to something resident. ``plain`` counts storages as plain PyTorch would have them. Code
    outside of any graph has its room throughout.
    """
    walk = _Walk(graph, costs, plain)
    walk.step(schedule)
    return Timeline(tuple(walk.moments), walk.lives(), walk.live - graph.outside_bytes, tuple(walk.transfers))


Key = tuple[int, int]


class _Walk:
    """Live storages as {(region, storage): holders}; a storage counts while anybody holds it."""

    def __init__(self, graph: StepGraph, costs: CostTable, plain: bool) -> None:
        self.graph, self.costs, self.plain = graph, costs, plain
        self.moments: list[Moment] = []
        self.holders: dict[Key, set[str]] = {}
        self.live = graph.outside_bytes
        self.since: dict[Key, int] = {}  # the moment since which something is alive
        self.ended: list[Life] = []
        self.last_reader = _last_readers(graph)
        self.clock = self.free = 0.0  # seconds: now, and when the last transfer ends
        self.due: dict[Key, float] = {}  # when what is on its way is there
        self.transfers: list[Transfer] = []

    def step(self, schedule: Schedule) -> None:
        for r in range(len(self.graph.regions)):
            self.forward(r, schedule)
        self.reserve(self.graph.reserve_bytes)
        if not self.graph.outputs_held:
            self.release_all("last forward")
        for r in reversed(range(len(self.graph.regions))):
            self.backward(r, schedule)
        self.release_all("backward()")

    def key(self, r: int, storage: int) -> Key:
        origin = self.graph.regions[r].storages[storage].origin
        return (r, storage) if origin is None else origin

    def nbytes(self, key: Key) -> int:
        storage = self.graph.regions[key[0]].storages[key[1]]
        if storage.kind is StorageKind.RESIDENT:
            return 0
        return storage.plain_nbytes if self.plain and storage.plain_nbytes >= 0 else storage.nbytes

    def hold(self, key: Key, who: str) -> None:
        holders = self.holders.setdefault(key, set())
        if not holders:
            self.live += self.nbytes(key)
            self.since[key] = len(self.moments)
        holders.add(who)

    def release(self, key: Key, who: str) -> None:
        holders = self.holders.get(key)
        if not holders or who not in holders:
            return
        holders.discard(who)
        if not holders:
            self._end(key)

    def _end(self, key: Key) -> None:
        self.live -= self.nbytes(key)
        self.holders.pop(key, None)  # a schedule that breaks the rules may write over what nobody holds
        first, last = self.since.pop(key, len(self.moments)), len(self.moments) - 1
        if last >= first:
            self.ended.append(Life(*key, first, last))

    def lives(self) -> tuple[Life, ...]:
        last = len(self.moments)
        found = [*self.ended, *(Life(*key, first, last) for key, first in self.since.items())]
        return tuple(sorted((life for life in found if self.nbytes((life.region, life.storage))), key=_since))

    def reserve(self, nbytes: int) -> None:
        if nbytes:
            self._note(-1, -1, True, False, self.live + nbytes, 0.0)

    def forward(self, r: int, schedule: Schedule) -> None:
        region, plan = self.graph.regions[r], schedule.regions[r]
        for event in plan.forward:
            if isinstance(event, Free):
                self.release(self.key(r, event.storage), f"forward{r}")
            elif isinstance(event, Run):
                self._run(r, event, f"forward{r}", backward=False)
        for storage in plan.kept:
            self.hold(self.key(r, storage), f"kept{r}")
        for value in region.outputs:
            if value >= 0:
                key = self.key(r, region.values[value].storage)
                between = self.last_reader.get(key, -1) > r
                self.hold(key, "caller" if region.held else "output" if between else "last forward")
        self.release_all(f"forward{r}")
        for key, last in self.last_reader.items():
            if last == r:
                self.release(key, "output")

    def backward(self, r: int, schedule: Schedule) -> None:
        region, plan = self.graph.regions[r], schedule.regions[r]
        tangents = {self.key(r, region.values[v].storage) for v in region.tangents}
        root = r == len(self.graph.regions) - 1 and not self.graph.reserve_bytes
        for key in tangents:
            self.hold(key, "backward()" if root else f"tangent{r}")
        self.release_all(f"gradient for {r}")
        applies = _applies(region, plan.backward)
        for index, event in enumerate(plan.backward):
            if isinstance(event, Free):
                for who in (f"kept{r}", f"backward{r}", f"tangent{r}"):
                    self.release(self.key(r, event.storage), who)
            elif isinstance(event, Run):
                self._run(r, event, f"backward{r}", backward=True, applies=applies.get(index, 0))
        ends = zip(region.gradients, region.accumulated, region.added, region.inputs, strict=True)
        for value, accumulated, added, given in ends:
            if value < 0 or added:
                continue
            key = self.key(r, region.values[value].storage)
            origin = region.storages[region.values[given].storage].origin
            target = r - 1 if origin is None else origin[0]
            self.hold(key, "gradient" if accumulated else f"gradient for {target}")
        for who in (f"kept{r}", f"backward{r}", f"tangent{r}"):
            self.release_all(who)

    def release_all(self, who: str) -> None:
        for key in [k for k, holders in self.holders.items() if who in holders]:
            self.release(key, who)

    def _run(self, r: int, event: Run, who: str, *, backward: bool, applies: int = 0) -> None:
        region = self.graph.regions[r]
        op = region.ops[event.op]
        recompute = backward and not op.backward
        cost = self.costs.rerun(op) if recompute else self.costs.plain(op) if self.plain else self.costs.run(op)
        made = self._made(r, region, op, recompute)
        twice = {k for k in made if recompute and k in self.holders}
        transient = sum(self.nbytes(k) for k in twice)  # made beside what somebody holds, and dropped at once
        if event.reuse >= 0:
            taken = self.key(r, region.values[event.reuse].storage)
            self._end(taken)
        for key in made:
            if key not in twice:
                self.hold(key, who)
        wait = self._wait(r, region, op, recompute)
        self.clock += wait + cost.seconds
        if cost.transfer:
            self._transfer(r, event.op, made, recompute, cost.transfer)
        working = max(cost.working_bytes, applies)
        self._note(r, event.op, backward, recompute, self.live + transient + working, cost.seconds, wait)

    def _wait(self, r: int, region: Region, op: Op, recompute: bool) -> float:
        """Seconds until all that the op reads has arrived."""
        if not self.due or op.view:
            return 0.0
        read = op.rerun.inputs if recompute and op.rerun is not None else op.inputs
        there = [self.due.pop(self.key(r, region.values[v].storage), 0.0) for v in read]
        return max(0.0, max(there, default=0.0) - self.clock)

    def _transfer(self, r: int, op: int, made: list[Key], back: bool, seconds: float) -> None:
        start = max(self.clock, self.free)
        self.free = start + seconds
        self.due.update((key, self.free) for key in made)
        self.transfers.append(Transfer(r, op, back, start, self.free))

    def _made(self, r: int, region: Region, op: Op, recompute: bool) -> list[Key]:
        outputs = op.rerun.outputs if recompute and op.rerun is not None else op.outputs
        read = {region.values[v].storage for v in op.inputs}
        made = dict.fromkeys(region.values[v].storage for v in outputs)
        return [self.key(r, s) for s in made if s not in read]

    def _note(
        self, r: int, op: int, backward: bool, recompute: bool, during: int, seconds: float, wait: float = 0.0
    ) -> None:
        self.moments.append(Moment(r, op, backward, recompute, during, self.live, seconds, wait))


def _since(life: Life) -> tuple[int, int, int, int]:
    return life.first, life.last, life.region, life.storage


def _applies(region: Region, events: Sequence[Event]) -> dict[int, int]:
    """Position of each Run after which gradients are applied → the bytes that this takes."""
    found: dict[int, int] = {}
    last = -1
    for index, event in enumerate(events):
        if isinstance(event, Run) and not region.ops[event.op].view:
            last = index
        elif isinstance(event, Deliver):
            found[last] = max(found.get(last, 0), applying(region, event.gradients))
    return found


def _last_readers(graph: StepGraph) -> dict[Key, int]:
    """For each boundary storage: the last region whose forward takes it as input."""
    last: dict[Key, int] = {}
    for r, region in enumerate(graph.regions):
        for value in region.inputs:
            origin = region.storages[region.values[value].storage].origin
            if origin is not None:
                last[origin] = r
    return last
