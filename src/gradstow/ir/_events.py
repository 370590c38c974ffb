"""Write decisions down as events: what runs when, what is given back when, what is written over.

A decision says only which forward ops run again, and before which backward op. The rest follows: a storage
that the backward reads before anything makes it again is kept from the forward; what is made again lives to
its last use before it is made once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gradstow.ir._deliver import delivered_storages, deliveries
from gradstow.ir._graph import Op, Region, StorageKind
from gradstow.ir._schedule import Deliver, Event, Free, RegionSchedule, Run

Reruns = Mapping[int, Sequence[int]]


def write_events(
    region: Region, reruns: Reruns, *, fixed: Iterable[int] = (), reuse: bool = True, plain: bool = False
) -> RegionSchedule:
    """The events of a region whose backward runs the forward ops ``reruns[b]`` before its op ``b``.

    ``fixed``: storages that somebody else holds while the backward runs, so that a copy made beside them is
    dropped at once. Views run just before their first use in each life of their storage. ``reuse`` lets
    elementwise ops write over an input that dies. ``plain`` writes what plain PyTorch does: nothing is written over
    and every gradient is handed over at once.
    """
    return _Writer(region, set(fixed), reuse and not plain, plain).write(reruns)


def just_in_time(region: Region, kept: Iterable[int], *, reuse: bool = True) -> RegionSchedule:
    """The events of a region that keeps ``kept`` and makes what else it needs again, once, before its first use.

    Storages that no op may make again are kept even where they were not asked for.
    """
    return write_events(region, _reruns_for(region, set(kept)), reuse=reuse)


def _reruns_for(region: Region, kept: set[int]) -> dict[int, list[int]]:
    look = _Region(region)
    there = kept | look.outside | look.constants | (look.outputs if region.held else set())
    result: dict[int, list[int]] = {}
    for index in look.order(backward=True):
        again: list[int] = []
        stack = [s for s in look.reads(index, again=False) if s not in there]
        while stack:
            storage = stack[-1]
            source = look.remaker.get(storage)
            if storage in there or source is None:
                there.add(storage)
                stack.pop()
                continue
            missing = [s for s in look.reads(source, again=True) if s not in there]
            if missing:
                stack += missing
                continue
            stack.pop()
            again.append(source)
            there.update(look.makes(source, again=True))
        there.update(look.makes(index, again=False))
        if again:
            result[index] = again
    return result


class _Region:
    """A region by storages: views have vanished."""

    def __init__(self, region: Region, plain: bool = False) -> None:
        self.region, self.plain = region, plain
        self.storage = [v.storage for v in region.values]
        self.producer = region.producers()
        self.outside = {self.storage[v] for v in (*region.inputs, *region.tangents)}
        self.outputs = {self.storage[v] for v in region.outputs if v >= 0}
        self.results = {self.storage[v] for v in region.gradients if v >= 0}
        self.constants: set[int] = set()  # made by a view of nothing: there whenever they are asked for
        self.base: dict[int, int] = {}  # storage → the value that it was made as
        self.remaker: dict[int, int] = {}  # storage → the forward op that can make it again
        for index, op in enumerate(region.ops):
            for v in op.outputs:
                if self.storage[v] not in self.outside:
                    self.base.setdefault(self.storage[v], v)
            if op.view and not op.inputs:
                self.constants.update(self.storage[v] for v in op.outputs)
            elif not (op.view or op.backward or op.pinned):
                for s in self.makes(index, again=True):
                    self.remaker.setdefault(s, index)

    def order(self, *, backward: bool) -> list[int]:
        return [i for i, op in enumerate(self.region.ops) if op.backward == backward and not op.view]

    def running(self, wanted: set[int]) -> list[int]:
        """The forward ops, without lazy ones that serve nobody; ``wanted``: storages that leave the forward."""
        read, result = set(wanted), []
        for index in reversed(self.order(backward=False)):
            if self.region.ops[index].lazy and not read.intersection(self.makes(index, again=False)):
                continue
            read.update(self.reads(index, again=False))
            result.append(index)
        return result[::-1]

    def values_read(self, index: int, again: bool) -> tuple[int, ...]:
        op = self.region.ops[index]
        if self.plain and op.plain is not None:
            return op.plain.inputs
        return op.rerun.inputs if again and op.rerun is not None else op.inputs

    def values_made(self, index: int, again: bool) -> tuple[int, ...]:
        op = self.region.ops[index]
        return op.rerun.outputs if again and op.rerun is not None else op.outputs

    def reads(self, index: int, *, again: bool) -> list[int]:
        """Storages that the op reads, by last mention; resident ones and constants are always there."""
        found = dict.fromkeys(reversed([self.storage[v] for v in self.values_read(index, again)]))
        return [s for s in reversed(found) if not self.is_resident(s)]

    def makes(self, index: int, *, again: bool) -> list[int]:
        """Storages that the op makes: those of its outputs that it does not read."""
        read = {self.storage[v] for v in self.values_read(index, again)} | self.outside
        made = dict.fromkeys(self.storage[v] for v in self.values_made(index, again))
        return [s for s in made if s not in read]

    def is_resident(self, storage: int) -> bool:
        return self.region.storages[storage].kind is StorageKind.RESIDENT


class _Writer:
    def __init__(self, region: Region, fixed: set[int], reuse: bool, plain: bool) -> None:
        self.look = look = _Region(region, plain)
        self.deliveries = deliveries(region, at_once=plain or not region.managed)
        self.leaving = delivered_storages(region, self.deliveries)
        self.delivered = {s for storages in self.leaving.values() for s in storages}
        self.region, self.reuse = region, reuse and region.managed
        self.fixed = fixed | (look.outputs if region.held else set())

    def write(self, reruns: Reruns) -> RegionSchedule:
        look = self.look
        backward: list[tuple[int, bool]] = []
        for index in look.order(backward=True):
            backward += [(i, True) for i in reruns.get(index, ())]
            backward.append((index, False))
        dies, needed = self._lives(backward, stay=look.results - self.delivered)
        kinds = (StorageKind.ACTIVATION, StorageKind.BOUNDARY)
        kept = {s for s in needed if self.region.storages[s].kind in kinds} - look.constants
        stay = kept | look.outputs
        forward = [(i, False) for i in look.running(stay)]
        there = {look.base[s] for s in kept | self.fixed if s in look.base} | set(self.region.tangents)
        return RegionSchedule(
            kept=tuple(sorted(kept)),
            forward=self._events(
                forward, self._lives(forward, stay=stay | look.outside)[0], set(), self.region.outputs, look.outside
            ),
            backward=self._events(
                backward, dies, there, self._results(), look.outside | kept | self.fixed | self.delivered
            ),
        )

    def _results(self) -> tuple[int, ...]:
        """Gradients that leave at the end."""
        early = {p for positions in self.deliveries.values() for p in positions}
        return tuple(v for p, v in enumerate(self.region.gradients) if p not in early)

    def _lives(self, order: list[tuple[int, bool]], *, stay: set[int]) -> tuple[list[list[int]], set[int]]:
        """For each position the storages whose life ends there; and what must be there at the start."""
        look, ops = self.look, self.region.ops
        ends = {ops[index].scope: position for position, (index, _) in enumerate(order)}
        open_: dict[int, int] = {}  # storage → where the life that we are in ends
        dies: list[dict[int, None]] = [{} for _ in order]
        for position in reversed(range(len(order))):
            index, again = order[position]
            end = position if ops[index].scope < 0 else ends[ops[index].scope]
            for s in () if again else self.leaving.get(index, ()):
                open_.setdefault(s, end)
            for s in look.makes(index, again=again):
                if s in open_ and not (again and s in self.fixed):
                    dies[open_.pop(s)][s] = None
                elif s not in open_:
                    dies[end][s] = None  # made, and read by nobody
            for s in look.reads(index, again=again):
                open_.setdefault(s, end)
        for s, position in open_.items():
            dies[position][s] = None
        gone = [[s for s in self._by_use(order[i], dying) if s not in stay] for i, dying in enumerate(dies)]
        return gone, set(open_)

    def _by_use(self, run: tuple[int, bool], dying: dict[int, None]) -> list[int]:
        """In the order in which the op mentions them, what it makes last."""
        mentioned = [*self.look.reads(run[0], again=run[1]), *self.look.makes(run[0], again=run[1])]
        return [s for s in dying if s not in mentioned] + [s for s in mentioned if s in dying]

    def _events(
        self,
        order: list[tuple[int, bool]],
        dies: list[list[int]],
        there: set[int],
        results: tuple[int, ...],
        untouchable: set[int],
    ) -> tuple[Event, ...]:
        """Runs with their views and frees. ``there``: values at the start beside the region's inputs."""
        look = self.look
        events: list[Event] = []
        available = set(self.region.inputs) | there
        on: dict[int, set[int]] = {}
        for value, storage in enumerate(look.storage):
            on.setdefault(storage, set()).add(value)

        def provide(values: Iterable[int]) -> None:
            stack = [v for v in values if v not in available]
            while stack:
                value = stack[-1]
                if value in available:
                    stack.pop()
                    continue
                index = look.producer[value]
                op = self.region.ops[index]
                assert op.view, f"{op.name} is needed and neither kept nor made again"
                missing = [v for v in op.inputs if v not in available]
                stack += missing
                if not missing:
                    stack.pop()
                    events.append(Run(index))
                    available.update(op.outputs)

        for (index, again), dying in zip(order, dies, strict=True):
            provide(look.values_read(index, again))
            taken = self._taken(self.region.ops[index], again, dying, untouchable)
            events.append(Run(index, taken))
            available.update(look.values_made(index, again))
            leaving = () if again else self.deliveries.get(index, ())
            if leaving:
                provide(self.region.gradients[p] for p in leaving)
                events.append(Deliver(leaving))
            for s in dying:
                available -= on[s]
                if taken < 0 or s != look.storage[taken]:
                    events.append(Free(s))
        provide([v for v in results if v >= 0])
        return tuple(events)

    def _taken(self, op: Op, again: bool, dying: list[int], untouchable: set[int]) -> int:
        made = self.look.storage[op.outputs[0]] if op.outputs else -1
        if not self.reuse or made in untouchable or (again and op.rerun is not None):
            return -1
        for v in op.overwrites:
            if self.look.storage[v] in dying and self.look.storage[v] not in untouchable:
                return v
        return -1
