"""A second replayer, written from the design's words and independent of ``gradstow.ir._replay``.

It does not walk a heap: it lists blocks of memory, each with its interval of life, and sums those alive
at each moment. The clock has two ticks per moment: 2m while op m runs, 2m + 1 after it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gradstow.ir import CostTable, Deliver, Free, Run, Schedule, StepGraph, StorageKind

Key = tuple[int, int]
OVER, FOREVER = 10**12, math.inf  # the tick when backward() returns, and never


@dataclass
class Block:
    """Some bytes that live from tick ``start`` up to, not including, tick ``end``."""

    nbytes: int
    start: float
    end: float = FOREVER


@dataclass
class Ledger:
    """Every block of the step, every moment's working memory, and when each part of each region runs."""

    graph: StepGraph
    schedule: Schedule
    costs: CostTable
    plain: bool = False
    blocks: list[Block] = field(default_factory=list)
    working: list[int] = field(default_factory=list)
    forward: list[tuple[int, int]] = field(default_factory=list)  # first moment, and the one after the last
    backward: dict[int, tuple[int, int]] = field(default_factory=dict)
    made: dict[Key, Block] = field(default_factory=dict)  # forward storages

    def __post_init__(self) -> None:
        for r in range(len(self.graph.regions)):
            self._forward(r)
        self.turn = len(self.working)  # the moment at which all forwards are over
        if self.graph.reserve_bytes:
            self.working.append(self.graph.reserve_bytes)
        self._time_backwards()
        for r in range(len(self.graph.regions)):
            self._hand_over(r)
        for r in self.backward:
            self._backward(r)

    def key(self, r: int, storage: int) -> Key:
        return self.graph.regions[r].storages[storage].origin or (r, storage)

    def nbytes(self, key: Key) -> int:
        item = self.graph.regions[key[0]].storages[key[1]]
        if item.kind is StorageKind.RESIDENT:
            return 0
        return item.plain_nbytes if self.plain and item.plain_nbytes != -1 else item.nbytes

    def on(self, r: int, values: tuple[int, ...]) -> set[int]:
        return {self.graph.regions[r].values[v].storage for v in values if v >= 0}

    def _forward(self, r: int) -> None:
        """Blocks made by the forward, up to where it gives them back itself."""
        first = len(self.working)
        for event in self.schedule.regions[r].forward:
            now = len(self.working)
            if isinstance(event, Free):
                self.made[r, event.storage].end = 2 * now
                continue
            op = self.graph.regions[r].ops[event.op]
            if event.reuse >= 0:
                self.made[r, self.graph.regions[r].values[event.reuse].storage].end = 2 * now
            for storage in self.on(r, op.outputs) - self.on(r, op.inputs):
                self.made[r, storage] = Block(self.nbytes((r, storage)), 2 * now)
                self.blocks.append(self.made[r, storage])
            self.working.append(self.costs.run(op).working_bytes)
        self.forward.append((first, len(self.working)))

    def _time_backwards(self) -> None:
        now = len(self.working)
        for r in reversed(range(len(self.graph.regions))):
            runs = sum(isinstance(e, Run) for e in self.schedule.regions[r].backward)
            self.backward[r] = (now, now + runs)
            now += runs

    def _hand_over(self, r: int) -> None:
        """What the forward left: dies with it, or is kept, handed to a later region or to the caller."""
        region = self.graph.regions[r]
        for storage, item in enumerate(region.storages):
            block = self.made.get((r, storage))
            if block is None or block.end != FOREVER:
                continue
            if item.kind is StorageKind.RESIDENT:
                block.end = block.start
                continue
            block.end = max(2 * end for end in self._ends(r, storage))

    def _ends(self, r: int, storage: int) -> list[float]:
        """Moments before which somebody still needs a storage of region r's forward."""
        ends: list[float] = [self.forward[r][1]]
        readers = [q for q in range(r + 1, len(self.graph.regions)) if (r, storage) in self._read(q)]
        if readers:
            ends.append(self.forward[max(readers)][1])
        for q, region in enumerate(self.graph.regions):
            here = {self.key(q, s): s for s in range(len(region.storages))}.get((r, storage))
            if here is None:
                continue
            if here in self.schedule.regions[q].kept:
                ends.append(self._kept_until(q, here))
            last = not any((r, storage) in self._read(p) for p in range(q + 1, len(self.graph.regions)))
            if here in self.on(q, region.outputs) and (region.held or last):
                stays = region.held or self.graph.outputs_held
                ends.append(FOREVER if stays else self.turn + bool(self.graph.reserve_bytes))
        return ends

    def _read(self, q: int) -> set[Key]:
        return {self.key(q, s) for s in self.on(q, self.graph.regions[q].inputs)}

    def _kept_until(self, q: int, storage: int) -> float:
        now, end = self.backward[q]
        for event in self.schedule.regions[q].backward:
            if isinstance(event, Run):
                now += 1
            elif isinstance(event, Free) and event.storage == storage:
                return now
        return end

    def _backward(self, r: int) -> None:
        region, plan = self.graph.regions[r], self.schedule.regions[r]
        now, end = self.backward[r]
        last = self._gradients_end(r)
        root = r == len(self.graph.regions) - 1 and not self.graph.reserve_bytes
        for s in self.on(r, region.tangents) if root else ():
            last[s] = max(last.get(s, 0), OVER)
        alive = {s: Block(self.nbytes((r, s)), 2 * now) for s in self.on(r, region.tangents)}
        self.blocks += alive.values()
        moment, beside = len(self.working), 0
        for event in plan.backward:
            if isinstance(event, Free) and event.storage in alive:
                alive.pop(event.storage).end = max(2 * now, last.get(event.storage, 0))
            if isinstance(event, Deliver) and region.applied:
                applied = max(region.applied[p] for p in event.gradients)
                self.working[moment] = max(self.working[moment], applied + beside)
            if not isinstance(event, Run):
                continue
            op = region.ops[event.op]
            again = not op.backward
            outputs = op.rerun.outputs if again and op.rerun is not None else op.outputs
            if event.reuse >= 0:
                alive.pop(region.values[event.reuse].storage).end = 2 * now
            extra = 0
            for s in self.on(r, outputs) - self.on(r, op.inputs):
                first = self.made.get((r, s))
                if again and (s in alive or (first and first.end > 2 * now)):
                    extra += self.nbytes((r, s))
                else:
                    alive[s] = Block(self.nbytes((r, s)), 2 * now)
                    self.blocks.append(alive[s])
            once = self.costs.plain(op) if self.plain else self.costs.run(op)
            cost = self.costs.rerun(op) if again else once
            if not op.view:  # what is applied behind it counts in its moment
                moment, beside = len(self.working), extra
            self.working.append(cost.working_bytes + extra)
            now += 1
        for s, block in alive.items():
            block.end = max(2 * end, last.get(s, 0))

    def _gradients_end(self, r: int) -> dict[int, float]:
        """Storage → tick at which the last one who gets it as a gradient has it in another form."""
        region = self.graph.regions[r]
        ends: dict[int, float] = {}
        flags = zip(region.gradients, region.accumulated, region.added, region.inputs, strict=True)
        for value, ends_in_grad, added, given in flags:
            if value < 0 or added:
                continue
            origin = region.storages[region.values[given].storage].origin
            taker = r - 1 if origin is None else origin[0]
            until = FOREVER if ends_in_grad or taker < 0 else 2 * self.backward[taker][0]
            storage = region.values[value].storage
            ends[storage] = max(ends.get(storage, 0), until)
        return ends

    def alive(self, tick: float) -> int:
        outside = self.graph.outside_bytes if tick < OVER else 0
        return outside + sum(b.nbytes for b in self.blocks if b.start <= tick < b.end)

    def during(self) -> list[int]:
        """Live bytes while each op runs, its working memory included."""
        return [self.alive(2 * m) + extra for m, extra in enumerate(self.working)]

    def end(self) -> int:
        """Live bytes when the step is over: gradients, and outputs that the caller holds."""
        return self.alive(OVER)

    def after(self) -> list[int]:
        """Live bytes after each op, before anything is given back."""
        return [self.alive(2 * m + 1) for m in range(len(self.working))]
