"""One row per value that the forward makes: its bytes, what was decided, why, and where it comes from.

A row stands for a storage. Views and in-place results share one, so the bytes of all rows add up.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from gradstow._codes import PLACES, about
from gradstow._units import format_bytes, format_seconds
from gradstow.ir import Op, PlanData, Region, StorageKind
from gradstow.report._names import module_path, short_target

Key = tuple[int, int]
_TICKET = 8  # bytes that stand for what waits elsewhere
DECISIONS = ("store", "recompute", "compress", "offload", "output", "free")


@dataclass(frozen=True, slots=True)
class Row:
    """One value of the step.

    Attributes:
        region: name of the region whose forward makes it.
        name: name of the value in the captured graph.
        nbytes: bytes of its storage.
        decision: "store" (kept from the forward to the backward), "recompute" (made again in the
            backward), "compress" (something smaller is kept, and read or decoded in the backward), "offload" (it waits
            elsewhere), "output" (the caller holds it anyway), "free" (the backward does not need it).
        reason: why, in a few words.
        shape, dtype, op, module, source: what it is, and which line of the model makes it.
        seconds: what making it again costs once, by its own op alone; 0 where that cannot be.
        reruns: how often its op runs again in the backward.
    """

    region: str
    name: str
    nbytes: int
    decision: str
    reason: str
    shape: tuple[int, ...]
    dtype: str
    op: str
    module: str
    source: str
    seconds: float = 0.0
    reruns: int = 0

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["bytes"] = data.pop("nbytes")
        return data


def plan_rows(plan: PlanData) -> tuple[Row, ...]:
    """The rows of a plan, in the order in which the forward makes the values."""
    view = _View(plan)
    return tuple(row for r in range(len(plan.graph.regions)) for row in view.rows(r))


def break_costs(plan: PlanData) -> tuple[int, ...]:
    """For each graph break the bytes that are kept for the backward because a later graph reads them."""
    view = _View(plan)
    pinned = (view.crossing & view.kept) - view.held
    return tuple(
        sum(plan.graph.regions[r].storages[s].nbytes for r, s in pinned if r in b.regions) for b in plan.graph.breaks
    )


def held_outputs(plan: PlanData) -> set[Key]:
    """Storages that the user's loop holds while the backward runs; one between two regions it never sees."""
    regions = plan.graph.regions
    crossing = {s.origin for region in regions for s in region.storages if s.origin is not None}
    found: set[Key] = set()
    for r, region in enumerate(regions):
        storages = {region.values[v].storage for v in region.outputs if v >= 0}
        keys = {region.storages[s].origin or (r, s) for s in storages}
        if not region.held:
            keys = keys - crossing if plan.graph.outputs_held else set()
        found |= keys
    return found


class _View:
    """Who keeps, holds and makes again which storage; storages by (region, id) of their maker."""

    def __init__(self, plan: PlanData) -> None:
        self.plan, self.regions = plan, plan.graph.regions
        self.kept: set[Key] = set()
        self.crossing: set[Key] = set()
        self.again: dict[Key, int] = {}
        self.codes: dict[Key, list[tuple[Key, str]]] = {}  # storage → what actions make of it, and the code's name
        for r, region in enumerate(self.regions):
            self.kept.update(self._key(r, s) for s in plan.schedule.regions[r].kept)
            self.crossing.update(s.origin for s in region.storages if s.origin is not None)
            self._count_reruns(r, region)
            self._find_codes(r, region)
        self.held = held_outputs(plan)

    def _key(self, r: int, storage: int) -> Key:
        return self.regions[r].storages[storage].origin or (r, storage)

    def _recomputed(self, r: int) -> list[Op]:
        ops = self.regions[r].ops
        forward = frozenset(i for i, op in enumerate(ops) if not op.backward and not op.view)
        return [ops[i] for i in self.plan.schedule.regions[r].recomputed(forward)]

    def _count_reruns(self, r: int, region: Region) -> None:
        for op in self._recomputed(r):
            outputs = op.outputs if op.rerun is None else op.rerun.outputs
            for storage in {region.values[v].storage for v in outputs}:
                key = self._key(r, storage)
                self.again[key] = self.again.get(key, 0) + 1

    def _find_codes(self, r: int, region: Region) -> None:
        sources: dict[int, Key] = {}  # storage of a code → what it stands for
        named = {region.values[v].storage: op.rerun.code for op in region.ops if op.rerun for v in op.rerun.inputs}
        for op in region.ops:
            if not op.lazy:
                continue
            read, made = (region.values[v].storage for v in (op.inputs[0], op.outputs[0]))
            if read in sources:  # decoded, and so the same as its source
                self.kept.update({sources[read]} if (r, made) in self.kept else ())
            else:
                sources[made] = self._key(r, read)
                self.codes.setdefault(sources[made], []).append(((r, made), named.get(made, "")))

    def _kept_codes(self, key: Key) -> list[tuple[int, str]]:
        """(bytes, code) of what stands for a storage; "" where that is exact."""
        found = [(code, name) for code, name in self.codes.get(key, []) if code in self.kept]
        return [(self.regions[r].storages[s].nbytes, name) for (r, s), name in found]

    def rows(self, r: int) -> list[Row]:
        region = self.regions[r]
        makers: dict[int, tuple[Op, int]] = {}
        for op in region.ops:
            for value in op.outputs if not (op.backward or op.lazy) else ():
                storage = region.values[value].storage
                if region.storages[storage].kind is StorageKind.ACTIVATION:
                    makers.setdefault(storage, (op, value))
        return [self._row(r, storage, op, value) for storage, (op, value) in makers.items()]

    def _row(self, r: int, storage: int, op: Op, value: int) -> Row:
        region, key = self.regions[r], (r, storage)
        nbytes, made = region.storages[storage].nbytes, region.values[value]
        decision = self._decision(key)
        obstacle = self._obstacle(region, op, value)
        return Row(
            region=region.name,
            name=made.name,
            nbytes=nbytes,
            decision=decision,
            reason=self._reason(key, decision, op, nbytes, obstacle),
            shape=made.shape,
            dtype=made.dtype,
            op=short_target(op.target),
            module=module_path(op.module),
            source=op.source,
            seconds=0.0 if obstacle else self.plan.costs.rerun(op).seconds,
            reruns=self.again.get(key, 0),
        )

    def _decision(self, key: Key) -> str:
        if key in self.held:
            return "output"
        if key in self.kept:
            return "store"
        codes = [name for _, name in self._kept_codes(key)]
        if codes:
            return "offload" if any(name in PLACES for name in codes) else "compress"
        return "recompute" if key in self.again else "free"

    def _obstacle(self, region: Region, op: Op, value: int) -> str:
        """Why the value cannot be made again, or ""."""
        if not region.managed:
            return "runs as plain PyTorch"
        if op.pinned:
            return op.pinned
        if op.rerun is not None and value not in op.rerun.outputs:
            return "not made by a rerun of its op"
        if op.view:
            return "a constant of the graph"
        return "cost unknown" if self.plan.costs.rerun(op).how == "unknown" else ""

    def _reason(self, key: Key, decision: str, op: Op, nbytes: int, obstacle: str) -> str:
        if decision == "output":
            return "held by the caller"
        if decision == "free":
            return "not needed by the backward"
        if decision == "offload":
            price = format_seconds(self.plan.costs.rerun(op).seconds)
            return f"waits {about(next(name for _, name in self._kept_codes(key) if name))}, back in {price}"
        if decision == "compress":
            codes = self._kept_codes(key)
            large = [(size, name) for size, name in codes if size > _TICKET]
            parts = (f"{format_bytes(size)}, {about(name) if name else 'exactly'}" for size, name in large)
            return f"kept as {' and '.join(parts)}"
        if decision == "store" and obstacle:
            return obstacle
        if decision == "store" and key in self.crossing:
            return "read by a later region"
        price = format_seconds(self.plan.costs.rerun(op).seconds)
        if decision == "recompute":
            times = self.again[key]
            return f"rerun costs {price}{f' × {times}' if times > 1 else ''}, frees {format_bytes(nbytes)}"
        return f"recompute costs {price} per {format_bytes(nbytes)}"
