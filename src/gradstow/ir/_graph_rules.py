"""The rules for legal graphs, one function each: it yields what breaks the rule in one region, in words.

Each rule may rely on those before it in ``GRAPH_RULES``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gradstow.ir._graph import Op, Region, StepGraph, StorageKind

_OUTSIDE = (StorageKind.RESIDENT, StorageKind.BOUNDARY)


@dataclass(frozen=True, slots=True)
class GraphRule:
    """A sentence, and what checks it: ``broken(graph, region)`` yields the offenders."""

    says: str
    broken: Callable[[StepGraph, int], Iterator[str]]


def op_name(region: Region, index: int) -> str:
    return f"op {index} ({region.ops[index].name}: {region.ops[index].target})"


def value_name(region: Region, value: int) -> str:
    return f"value {value} ({region.values[value].name})"


def _ids(graph: StepGraph, r: int) -> Iterator[str]:
    region = graph.regions[r]
    values, storages = len(region.values), len(region.storages)
    for index, value in enumerate(region.values):
        if not 0 <= value.storage < storages:
            yield f"value {index} on storage {value.storage}"
    for index, op in enumerate(region.ops):
        again = () if op.rerun is None else op.rerun.inputs + op.rerun.outputs
        for v in op.inputs + op.outputs + op.overwrites + again:
            if not 0 <= v < values:
                yield f"value {v} of op {index} ({op.name})"
        for s in op.writes:
            if not 0 <= s < storages:
                yield f"storage {s} that op {index} ({op.name}) writes"
    for v in region.inputs + region.tangents:
        if not 0 <= v < values:
            yield f"input or tangent {v}"
    for v in region.outputs + region.gradients:
        if not -1 <= v < values:
            yield f"output or gradient {v}"


def _lengths(graph: StepGraph, r: int) -> Iterator[str]:
    region = graph.regions[r]
    flags = (len(region.accumulated), len(region.added))
    if not len(region.inputs) == len(region.gradients) == flags[0] == flags[1]:
        sizes = f"{len(region.inputs)} inputs, {len(region.gradients)} gradients, {flags[0]} and {flags[1]} flags"
        yield sizes
    if region.applied and len(region.applied) != len(region.gradients):
        yield f"{len(region.applied)} notes of applied gradients"
    if region.tangent_mask and sum(region.tangent_mask) != len(region.tangents):
        yield f"{len(region.tangents)} tangents, {sum(region.tangent_mask)} of them in the mask"


def _sizes(graph: StepGraph, r: int) -> Iterator[str]:
    for index, storage in enumerate(graph.regions[r].storages):
        if storage.nbytes < 0 or storage.plain_nbytes < -1:
            yield f"storage {index} of {storage.nbytes} bytes (plain {storage.plain_nbytes})"
    resident = graph.resident
    parts = (resident.parameters, resident.buffers, resident.gradients, resident.optimizer, resident.batch)
    rooms = {
        "reserve": graph.reserve_bytes,
        "optimizer": graph.optimizer_peak_bytes,
        "outside": graph.outside_bytes,
    }
    if min(*parts, *rooms.values()) < 0:
        yield f"{resident}, " + ", ".join(f"{name} {nbytes}" for name, nbytes in rooms.items())


def _forward_first(graph: StepGraph, r: int) -> Iterator[str]:
    region = graph.regions[r]
    seen = False
    for index, op in enumerate(region.ops):
        seen = seen or op.backward
        if seen and not op.backward:
            yield op_name(region, index)


def _made_once(graph: StepGraph, r: int) -> Iterator[str]:
    region = graph.regions[r]
    times = [0] * len(region.values)
    for v in (*region.inputs, *region.tangents, *(v for op in region.ops for v in op.outputs)):
        times[v] += 1
    for v, count in enumerate(times):
        if count != 1:
            yield f"{value_name(region, v)}, made {count} times,"


def _made_before_use(graph: StepGraph, r: int) -> Iterator[str]:
    region = graph.regions[r]
    made, tangents = set(region.inputs), set(region.tangents)
    for index, op in enumerate(region.ops):
        for v in op.inputs:
            if v not in made and not (op.backward and v in tangents):
                yield f"{op_name(region, index)}, which reads {value_name(region, v)},"
        made.update(op.outputs)


def _named(graph: StepGraph, r: int) -> Iterator[str]:
    region = graph.regions[r]
    used = {value.storage for value in region.values}
    for s in range(len(region.storages)):
        if s not in used:
            yield f"storage {s}, on which no value lies,"


def _kinds(graph: StepGraph, r: int) -> Iterator[str]:
    region = graph.regions[r]
    legal = dict.fromkeys(region.tangents, (StorageKind.TANGENT,)) | dict.fromkeys(region.inputs, _OUTSIDE)
    for v, kinds in legal.items():
        if region.storages[region.values[v].storage].kind not in kinds:
            yield value_name(region, v)
    for op in region.ops:
        own = StorageKind.GRADIENT if op.backward else StorageKind.ACTIVATION
        read = {region.values[v].storage for v in op.inputs}
        for v in op.outputs:
            storage = region.values[v].storage
            constant = not op.inputs and op.view and region.storages[storage].kind is StorageKind.RESIDENT
            if storage not in read and region.storages[storage].kind is not own and not constant:
                yield f"{value_name(region, v)}, made by {op.name},"


def _one_maker(graph: StepGraph, r: int) -> Iterator[str]:
    region = graph.regions[r]
    maker: dict[int, int] = {}
    for index, op in enumerate(region.ops):
        read = {region.values[v].storage for v in op.inputs}
        for v in op.outputs:
            storage = region.values[v].storage
            if maker.get(storage, index) != index and storage not in read:
                yield f"storage {storage}, made by op {maker[storage]} and by {op_name(region, index)},"
            maker.setdefault(storage, index)


def _origins(graph: StepGraph, r: int) -> Iterator[str]:
    seen: set[tuple[int, int]] = set()
    for index, storage in enumerate(graph.regions[r].storages):
        if (storage.origin is None) == (storage.kind is StorageKind.BOUNDARY):
            yield f"storage {index} ({storage.kind.value}, origin {storage.origin})"
        if storage.origin is None:
            continue
        maker, there = storage.origin
        if storage.origin in seen or not 0 <= maker < r or not 0 <= there < len(graph.regions[maker].storages):
            yield f"storage {index} with origin {storage.origin}"
            continue
        seen.add(storage.origin)
        source = graph.regions[maker]
        given = {source.values[v].storage for v in source.outputs if v >= 0}
        made = source.storages[there]
        if there not in given or made.kind is not StorageKind.ACTIVATION or made.nbytes != storage.nbytes:
            yield f"storage {index} with origin {storage.origin} ({made.kind.value}, {made.nbytes} bytes)"


def _views(graph: StepGraph, r: int) -> Iterator[str]:
    region = graph.regions[r]
    for index, op in enumerate(region.ops):
        if not op.view:
            continue
        read = {region.values[v].storage for v in op.inputs}
        made = {region.values[v].storage for v in op.outputs} - read
        own = any(op.inputs or region.storages[s].kind is not StorageKind.RESIDENT for s in made)
        if own or op.pinned or op.writes or op.overwrites or op.rerun is not None:
            yield op_name(region, index)


def _lazy(graph: StepGraph, r: int) -> Iterator[str]:
    region = graph.regions[r]
    lazy = {v for op in region.ops if op.lazy for v in op.outputs}
    for index, op in enumerate(region.ops):
        reads = not (op.lazy or op.backward) and lazy.intersection(op.inputs)
        alone = op.lazy and (op.backward or op.view or op.scope >= 0 or not region.managed)
        if reads or alone or (op.lazy and lazy.intersection(op.outputs) & set(region.outputs)):
            yield op_name(region, index)


def _bases(graph: StepGraph, r: int) -> Iterator[str]:
    region = graph.regions[r]
    for index, op in enumerate(region.ops):
        if op.view:
            continue
        made = [region.values[v].storage for v in op.outputs]
        aliases = {region.values[v].storage for v in op.inputs} - set(op.writes)
        if len(set(made)) < len(made) or aliases & set(made):
            yield op_name(region, index)


def _writes(graph: StepGraph, r: int) -> Iterator[str]:
    region = graph.regions[r]
    for index, op in enumerate(region.ops):
        read = {region.values[v].storage for v in op.inputs}
        for s in op.writes:
            once = op.pinned or op.rerun is not None or op.backward
            if s not in read or region.storages[s].kind not in _OUTSIDE or not once:
                yield f"{op_name(region, index)}, which writes storage {s},"


def _overwrites(graph: StepGraph, r: int) -> Iterator[str]:
    region = graph.regions[r]
    for index, op in enumerate(region.ops):
        if not op.overwrites:
            continue
        sizes = {region.storages[region.values[v].storage].nbytes for v in (*op.overwrites, *op.outputs[:1])}
        if not set(op.overwrites) <= set(op.inputs) or not op.outputs or len(sizes) > 1 or op.rerun is not None:
            yield op_name(region, index)


def _reruns(graph: StepGraph, r: int) -> Iterator[str]:
    region = graph.regions[r]
    made = set(region.inputs)
    codes = {v for op in region.ops if op.lazy and op.pinned for v in op.outputs}
    for index, op in enumerate(region.ops):
        made.update(op.outputs)
        if op.rerun is None:
            continue
        inputs, outputs = set(op.rerun.inputs), set(op.rerun.outputs)
        there = codes if op.rerun.code else made - outputs
        legal = outputs and outputs <= set(op.outputs) and inputs <= there
        if op.backward or op.pinned or not legal:
            yield op_name(region, index)


def _results(graph: StepGraph, r: int) -> Iterator[str]:
    region = graph.regions[r]
    forward = {v for op in region.ops if not op.backward for v in op.outputs} | set(region.inputs)
    backward = {v for op in region.ops if op.backward for v in op.outputs} | set(region.tangents)
    for v in region.outputs:
        if v >= 0 and v not in forward:
            yield f"output {value_name(region, v)}"
    gradients = zip(region.gradients, region.accumulated, region.added, region.inputs, strict=True)
    for v, accumulated, added, given in gradients:
        kind = region.storages[region.values[v].storage].kind
        own = v in backward and kind in (StorageKind.GRADIENT, StorageKind.TANGENT)
        target = region.storages[region.values[given].storage].kind
        if (v >= 0 and not own) or (accumulated and target is not StorageKind.RESIDENT) or added > accumulated:
            yield f"gradient {v} of {value_name(region, given)}"


def _twins(graph: StepGraph, r: int) -> Iterator[str]:
    region = graph.regions[r]
    for before, other in enumerate(graph.regions[:r]):
        same = [_shape(region), _shape(other)]
        if region.fingerprint and region.fingerprint == other.fingerprint and same[0] != same[1]:
            yield f"fingerprint {region.fingerprint}, that of region {before},"


def _shape(region: Region) -> list[object]:
    """What the planner takes to be equal in regions that run the same graph."""
    return [[s.nbytes for s in region.storages], [v.storage for v in region.values], *map(_reads_and_makes, region.ops)]


def _reads_and_makes(op: Op) -> tuple[object, ...]:
    return op.target, op.inputs, op.outputs, op.backward


GRAPH_RULES: dict[str, GraphRule] = {
    "ids": GraphRule("ids are positions in the region's tables", _ids),
    "lengths": GraphRule("each input has a gradient and a flag; each arriving tangent is in the mask", _lengths),
    "sizes": GraphRule("no bytes below zero", _sizes),
    "forward-first": GraphRule("all forward ops come before all backward ops", _forward_first),
    "made-once": GraphRule("a value is an input, a tangent or an output of one op", _made_once),
    "made-before-use": GraphRule(
        "an op reads what exists before it; tangents arrive after the forward", _made_before_use
    ),
    "named": GraphRule("every storage has a value", _named),
    "kinds": GraphRule("a storage's kind says who made it", _kinds),
    "one-maker": GraphRule("a storage is made by one op; others put values on it only if they read it", _one_maker),
    "origins": GraphRule("a boundary storage, and no other, comes out of an earlier region, once", _origins),
    "views": GraphRule("a view makes no storage of its own (a constant's is resident) and has no effects", _views),
    "lazy": GraphRule("a lazy op is in the forward of a managed region, which reads nothing of it", _lazy),
    "bases": GraphRule("an op that is no view makes one value per storage, over an input only if it writes it", _bases),
    "writes": GraphRule("only what comes from outside is changed in place, by an op that never runs twice", _writes),
    "overwrites": GraphRule("an op may write over inputs of its first output's size, in its own form", _overwrites),
    "reruns": GraphRule("a rerun makes outputs of its op, from others, what was there, or a code", _reruns),
    "results": GraphRule("outputs come from the forward, gradients from the backward, .grad is resident", _results),
    "twins": GraphRule("regions with one fingerprint have one structure", _twins),
}
