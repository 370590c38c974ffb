"""Write a set of kept storages down as events: what runs when, what is freed when, what is written over."""

from __future__ import annotations

from collections.abc import Iterable

from gradstow.ir._graph import Op, Region, StorageKind
from gradstow.ir._schedule import Event, Free, RegionSchedule, Run


def just_in_time(region: Region, kept: Iterable[int], *, reuse: bool = True) -> RegionSchedule:
    """The events of a region that keeps the storages ``kept`` from its forward to its backward.

    What the backward needs and was not kept is made again just before its first use and lives until its
    last use. Views too run just before their first use, and not at all where nothing reads them. Storages
    that no op may make again are kept even where they were not asked for. ``reuse`` lets elementwise ops
    write over an input that dies.
    """
    return _Builder(region, set(kept), reuse).build()


class _Builder:
    def __init__(self, region: Region, kept: set[int], reuse: bool) -> None:
        self.region, self.reuse = region, reuse and region.managed
        self.storage = [v.storage for v in region.values]
        self.producer = region.producers()
        self.inputs = set(region.inputs) | set(region.tangents)
        self.outside = {self.storage[v] for v in self.inputs}
        self.outputs = {self.storage[v] for v in region.outputs if v >= 0}
        self.results = {self.storage[v] for v in region.gradients if v >= 0}
        kinds = (StorageKind.ACTIVATION, StorageKind.BOUNDARY)
        self.kept = {s for s in kept if region.storages[s].kind in kinds}
        held = self.outputs if region.held else set()
        self.free = {s for s in held if region.storages[s].kind in kinds}  # kept without cost
        self.base: dict[int, int] = {}
        for op in region.ops:
            for v in op.outputs:
                if self.storage[v] not in self.outside:
                    self.base.setdefault(self.storage[v], v)

    def build(self) -> RegionSchedule:
        forward, backward = self._forward(), self._backward()
        kept = self._really_kept(backward)
        return RegionSchedule(
            kept=tuple(sorted(kept)),
            forward=self._events(forward, stay=kept | self.outputs, untouchable=self.outside, again=False),
            backward=self._events(backward, stay=self.results, untouchable=self.outside | kept | self.free, again=True),
        )

    def _forward(self) -> list[int]:
        """The forward's ops in graph order, each view before its first reader."""
        order: list[int] = []
        available = set(self.region.inputs)
        for index, op in enumerate(self.region.ops):
            if not op.backward and not op.view:
                self._run(index, available, order)
        self._provide([v for v in self.region.outputs if v >= 0], available, order)
        return order

    def _backward(self) -> list[int]:
        """The backward's ops with the recomputations and views that they need, in running order."""
        order: list[int] = []
        kept, available = self.kept | self.free, set(self.inputs)
        available.update(v for s, v in self.base.items() if s in kept and not self._is_backward(v))
        for index, op in enumerate(self.region.ops):
            if op.backward and not op.view:
                self._run(index, available, order)
        self._provide([v for v in self.region.gradients if v >= 0], available, order)
        return order

    def _run(self, index: int, available: set[int], order: list[int]) -> None:
        op = self.region.ops[index]
        self._provide(op.inputs, available, order)
        order.append(index)
        available.update(op.outputs)

    def _provide(self, values: Iterable[int], available: set[int], order: list[int]) -> None:
        """Run what makes these values available: views, and in the backward recomputations."""
        stack = [v for v in values if v not in available]
        while stack:
            value = stack[-1]
            if value in available:
                stack.pop()
                continue
            source = self.region.ops[self.producer[value]]
            if not self._can_make_again(source, value):
                self._keep(value, available)
                continue
            missing = [v for v in self._needs(source) if v not in available]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            order.append(self.producer[value])
            available.update(self._makes(source))

    def _keep(self, value: int, available: set[int]) -> None:
        """Keep the storage of a value that cannot be made again; its views are made from the base."""
        storage = self.storage[value]
        self.kept.add(storage)
        available.add(self.base[storage])

    def _is_backward(self, value: int) -> bool:
        return self.region.ops[self.producer[value]].backward

    def _can_make_again(self, op: Op, value: int) -> bool:
        if op.view:
            return True
        return not op.pinned and (op.rerun is None or value in op.rerun.outputs)

    def _needs(self, op: Op) -> tuple[int, ...]:
        return op.inputs if op.rerun is None else op.rerun.inputs

    def _makes(self, op: Op) -> tuple[int, ...]:
        return op.outputs if op.rerun is None else op.rerun.outputs

    def _reads(self, index: int, again: bool) -> tuple[int, ...]:
        op = self.region.ops[index]
        return self._needs(op) if again and not op.backward else op.inputs

    def _really_kept(self, backward: list[int]) -> set[int]:
        """Kept storages that the backward reads before anything makes them again."""
        read: set[int] = set()
        for index in backward:
            read.update(self.storage[v] for v in self._reads(index, again=True))
        boundary = {s for s in self.outside if self.region.storages[s].kind is StorageKind.BOUNDARY}
        return ((self.kept | self.free) - self.results | boundary) & read

    def _events(self, order: list[int], *, stay: set[int], untouchable: set[int], again: bool) -> tuple[Event, ...]:
        last: dict[int, int] = {}
        ends = {self.region.ops[index].scope: position for position, index in enumerate(order)}
        for position, index in enumerate(order):
            op = self.region.ops[index]
            end = position if op.scope < 0 else ends[op.scope]
            made = self._makes(op) if again and not op.backward else op.outputs
            for v in self._reads(index, again):
                last[self.storage[v]] = end
            for v in made:
                if not (again and self.storage[v] in untouchable):
                    last[self.storage[v]] = end
        dies: dict[int, list[int]] = {}
        for storage, position in last.items():
            free = storage not in stay and (storage not in self.outside or again)
            if free and not self._is_resident(storage):
                dies.setdefault(position, []).append(storage)
        events: list[Event] = []
        for position, index in enumerate(order):
            dying = dies.get(position, [])
            taken = self._taken(self.region.ops[index], dying, untouchable)
            events.append(Run(index, taken))
            gone = self.storage[taken] if taken >= 0 else -1
            events.extend(Free(s) for s in dying if s != gone)
        return tuple(events)

    def _taken(self, op: Op, dying: list[int], untouchable: set[int]) -> int:
        if not self.reuse:
            return -1
        for v in op.overwrites:
            storage = self.storage[v]
            if storage in dying and storage not in untouchable:
                return v
        return -1

    def _is_resident(self, storage: int) -> bool:
        return self.region.storages[storage].kind is StorageKind.RESIDENT
