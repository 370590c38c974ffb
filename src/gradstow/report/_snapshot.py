"""What memory holds at one moment of a step: one row per tensor, which add up to the live bytes.

A row stands for a storage, so views and in-place results count once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradstow.ir import Life, Op, PlanData, Region, StorageKind, Timeline
from gradstow.report._names import module_path, short_target
from gradstow.report._rows import held_outputs
from gradstow.report._summary import Place, place

# in the order in which they are stacked: what is there all the time, what crosses to the backward, what comes and goes
PARTS = {
    "parameters": "parameters",
    "buffers": "buffers",
    "gradients": "gradients of parameters",
    "optimizer": "optimizer state",
    "batch": "the batch",
    "saved": "values saved for the backward",
    "outputs": "outputs that the loop holds",
    "recomputed": "values made again in the backward",
    "temporary": "values that are soon free, and their gradients",
    "working": "working memory inside of an op",
    "outside": "code outside of any graph",
}
_ALWAYS = ("parameters", "buffers", "gradients", "optimizer", "batch")


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor that is alive.

    Attributes:
        part: what it is for, one of ``PARTS``.
        nbytes: bytes of its storage.
        op, module, source: what made it, in which module, by which line of the model.
        until: what holds it, in words: the last op that reads it.
    """

    name: str
    part: str
    nbytes: int
    shape: tuple[int, ...] = ()
    dtype: str = ""
    op: str = ""
    module: str = ""
    source: str = ""
    until: str = ""

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["bytes"] = data.pop("nbytes")
        return data


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything alive at one moment, the largest first.

    Attributes:
        at: the moment; None for a step without any.
        peak_bytes: all live bytes of training then; ``rows`` add up to it.
    """

    at: Place | None
    peak_bytes: int
    rows: tuple[Held, ...]

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of each part that is there."""
        found = {part: sum(row.nbytes for row in self.rows if row.part == part) for part in PARTS}
        return {part: nbytes for part, nbytes in found.items() if nbytes}

    def by(self, what: str) -> dict[str, int]:
        """Bytes by "op", "module" or "source", the most first; "" is what has none."""
        found: dict[str, int] = {}
        for row in self.rows:
            key = str(getattr(row, what))
            found[key] = found.get(key, 0) + row.nbytes
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def to_json(self) -> dict[str, Any]:
        return {
            "at": None if self.at is None else str(self.at),
            "peak_bytes": self.peak_bytes,
            "parts": self.parts,
            "rows": [row.to_json() for row in self.rows],
        }


@dataclass(frozen=True, slots=True)
class Level:
    """Live bytes at one moment, by parts; ``seconds`` from the start of the step to the end of the op."""

    seconds: float
    parts: dict[str, int]
    at: Place

    @property
    def nbytes(self) -> int:
        return sum(self.parts.values())


class Story:
    """A plan's step, or plain PyTorch's, told from its timeline: what is alive when, and what for."""

    def __init__(self, plan: PlanData, *, plain: bool, weights: Sequence[Held] = ()) -> None:
        self.plan, self.graph = plan, plan.graph
        self.timeline: Timeline = plan.plain_timeline if plain else plan.timeline
        schedule = plan.plain if plain else plan.schedule
        self.kept = [frozenset(own.kept) for own in schedule.regions]
        self.outputs = held_outputs(plan)
        self.read_back = _read_back(self.graph.regions)
        self.makers = [_makers(region) for region in self.graph.regions]
        self.gradients = [_gradients(region) for region in self.graph.regions]
        self.plain = plain
        self.always = _resident(plan, weights)

    def peak(self) -> Snapshot:
        """At the worst moment, that of ``optimizer.step`` included where it is known."""
        if self.plan.graph.optimizer_peak_bytes and self._optimizer_bytes() > self.timeline.peak_bytes:
            working = Held("optimizer.step", "working", self.graph.optimizer_peak_bytes, op="optimizer.step")
            return self._snapshot(Place("optimizer.step", "", "", "optimizer"), len(self.timeline.moments), [working])
        if not self.timeline.moments:
            return self._snapshot(None, 0, [])
        return self.at(self.timeline.peak_index)

    def _optimizer_bytes(self) -> int:
        return self.timeline.end_bytes + self.graph.optimizer_peak_bytes

    def at(self, index: int) -> Snapshot:
        """At one moment of the timeline, with what its op makes and needs."""
        now = place(self.graph, self.timeline.moments[index])
        more = [Held(f"inside of {now.op}", "working", self._working(index), (), "", now.op, now.module, now.source)]
        if self.graph.outside_bytes:
            name = ", ".join(dict.fromkeys(self.graph.outside)) or "ops outside of any graph"
            more.append(Held(name, "outside", self.graph.outside_bytes))
        return self._snapshot(now, index, more)

    def _snapshot(self, at: Place | None, index: int, more: Iterable[Held]) -> Snapshot:
        rows = [*self.always, *(self.held(life) for life in self.timeline.alive(index)), *more]
        shown = tuple(sorted((row for row in rows if row.nbytes), key=lambda row: -row.nbytes))
        return Snapshot(at, sum(row.nbytes for row in shown), shown)

    def _working(self, index: int) -> int:
        moment = self.timeline.moments[index]
        return moment.during_bytes - moment.after_bytes

    def levels(self) -> list[Level]:
        """Every moment, its bytes by parts."""
        changes: list[dict[str, int]] = [{} for _ in range(len(self.timeline.moments) + 1)]
        for life in self.timeline.lives:
            part, nbytes = self.part(life), self.nbytes(life)
            for index, sign in ((life.first, 1), (life.last + 1, -1)):
                if index < len(changes):
                    changes[index][part] = changes[index].get(part, 0) + sign * nbytes
        now = dict.fromkeys(PARTS, 0)
        for row in self.always:
            now[row.part] += row.nbytes
        now["outside"] += self.graph.outside_bytes
        found, seconds = [], 0.0
        for index, moment in enumerate(self.timeline.moments):
            for part, nbytes in changes[index].items():
                now[part] += nbytes
            seconds += moment.wait + moment.seconds
            parts = {**now, "working": now["working"] + self._working(index)}
            found.append(Level(seconds, parts, place(self.graph, moment)))
        return found

    def curve(self) -> list[tuple[float, int]]:
        """(seconds at which an op starts, bytes above what is resident while it runs), and the end of the step."""
        found, seconds = [], 0.0
        for moment in self.timeline.moments:
            seconds += moment.wait
            found.append((seconds, moment.during_bytes))
            seconds += moment.seconds
        return [*found, (seconds, self.timeline.end_bytes)]

    def nbytes(self, life: Life) -> int:
        storage = self.graph.regions[life.region].storages[life.storage]
        return storage.plain_nbytes if self.plain and storage.plain_nbytes >= 0 else storage.nbytes

    def part(self, life: Life) -> str:
        kind = self.graph.regions[life.region].storages[life.storage].kind
        if kind is StorageKind.GRADIENT:
            return "gradients" if life.storage in self.gradients[life.region] else "temporary"
        if kind is not StorageKind.ACTIVATION:
            return "temporary"
        if (life.region, life.storage) in self.outputs:
            return "outputs"
        maker = self.makers[life.region].get(life.storage)
        made = life.first < len(self.timeline.moments) and self.timeline.moments[life.first]
        if made and made.recompute and maker is not None:
            return "recomputed"
        return "saved" if life.storage in self.kept[life.region] else "temporary"

    def saved(self, life: Life) -> bool:
        """Whether the backward reads it: an output that the loop holds anyway may be saved, too."""
        part = self.part(life)
        return part == "saved" or (part == "outputs" and (life.region, life.storage) in self.read_back)

    def held(self, life: Life) -> Held:
        region = self.graph.regions[life.region]
        op, value = self.makers[life.region].get(life.storage, (None, -1))
        found = region.values[value] if value >= 0 else next(v for v in region.values if v.storage == life.storage)
        return Held(
            name=found.name,
            part=self.part(life),
            nbytes=self.nbytes(life),
            shape=found.shape,
            dtype=found.dtype,
            op=short_target(op.target) if op is not None else "",
            module=module_path(op.module) if op is not None else "",
            source=op.source if op is not None else "",
            until=self._until(life),
        )

    def _until(self, life: Life) -> str:
        """What holds it: the op that reads it last."""
        if life.last >= len(self.timeline.moments):
            return "the end of the step"
        return str(place(self.graph, self.timeline.moments[life.last]))


def _makers(region: Region) -> dict[int, tuple[Op, int]]:
    """Storage → the op that makes it, and the first value on it."""
    found: dict[int, tuple[Op, int]] = {}
    for op in region.ops:
        for value in op.outputs:
            found.setdefault(region.values[value].storage, (op, value))
    return found


def _read_back(regions: Sequence[Region]) -> set[tuple[int, int]]:
    """Storages that an op of a backward reads, as (region, id) of their makers."""
    found = set()
    for r, region in enumerate(regions):
        for op in region.ops:
            for value in op.inputs if op.backward and not op.view else ():
                storage = region.values[value].storage
                found.add(region.storages[storage].origin or (r, storage))
    return found


def _gradients(region: Region) -> frozenset[int]:
    """Storages that become a ``.grad``."""
    ends = zip(region.gradients, region.accumulated, region.added, strict=True)
    return frozenset(region.values[v].storage for v, first, added in ends if v >= 0 and first and not added)


def _resident(plan: PlanData, weights: Sequence[Held]) -> list[Held]:
    """What is alive before the step: by its names where they are known, the rest of each part as one row."""
    found = list(weights)
    for part in _ALWAYS:
        rest = getattr(plan.graph.resident, part) - sum(row.nbytes for row in weights if row.part == part)
        if rest > 0:
            found.append(Held(PARTS[part], part, rest))
    return found
