"""When gradients leave a region whose backward still runs: as soon as they are made, as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gradstow.ir._graph import Region, StorageKind

_WAIT = 128  # small gradients wait for each other, up to this part of the largest one


def deliveries(region: Region, *, at_once: bool = False) -> dict[int, tuple[int, ...]]:
    """Backward op → the gradients, as positions in ``region.gradients``, that are handed over once it has run.

    Only gradients that are added to a ``.grad`` that exists, or applied: their memory is free after that, where one
    that becomes the ``.grad`` stays anyway. One that is applied changes its parameter, and waits until nothing can read
    that any more. Each hand-over takes some microseconds, so small ones wait for others. ``at_once``: none waits.
    """
    if not (region.streams or at_once):
        return {}
    made = _made_by(region)
    if region.applied:
        made = _after_readers(region, made)
    limit = 0 if at_once else max((_nbytes(region, p) for p in made), default=0) // _WAIT
    found: dict[int, tuple[int, ...]] = {}
    waiting: list[int] = []
    last = -1
    for index in (i for i, op in enumerate(region.ops) if op.backward and not op.view):
        waiting += [position for position, op in made.items() if op == index]
        if _sum(region, waiting) > limit:
            found[index] = tuple(waiting)
            waiting = []
        last = index
    if waiting:
        found[last] = tuple(waiting)
    return found


def delivered_storages(region: Region, found: Mapping[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """The same by storages, each once."""
    return {
        op: tuple(dict.fromkeys(region.values[region.gradients[p]].storage for p in positions))
        for op, positions in found.items()
    }


def applying(region: Region, positions: Iterable[int]) -> int:
    """Bytes that applying these gradients takes, one after the other, beside them."""
    return max((region.applied[p] for p in positions), default=0) if region.applied else 0


def _after_readers(region: Region, made: Mapping[int, int]) -> dict[int, int]:
    """The same, but not before the last backward op that can read the parameter: by itself, or through a forward op
    that reads it and may run again for that op."""
    last: dict[int, int] = {}  # storage → the last backward op that reads it, or what is made of it
    for index, op in enumerate(region.ops):
        if op.backward and not op.view:
            last.update((region.values[v].storage, index) for v in op.inputs)
    for op in reversed(region.ops):
        if op.backward or (op.pinned and not op.view):
            continue
        again = op.rerun
        outputs = {region.values[v].storage for v in (*op.outputs, *(again.outputs if again else ()))}
        through = max((last.get(s, -1) for s in outputs), default=-1)
        for v in (*op.inputs, *(again.inputs if again else ())):
            storage = region.values[v].storage
            last[storage] = max(through, last.get(storage, -1))
    return {p: max(op, last.get(region.values[region.inputs[p]].storage, -1)) for p, op in made.items()}


def _nbytes(region: Region, position: int) -> int:
    return region.storages[region.values[region.gradients[position]].storage].nbytes


def _sum(region: Region, positions: list[int]) -> int:
    storages = {region.values[region.gradients[p]].storage for p in positions}
    return sum(region.storages[s].nbytes for s in storages)


def _made_by(region: Region) -> dict[int, int]:
    """Position of each gradient that may leave early → the op that makes it, views not counted."""
    producers = region.producers()
    on: dict[int, list[int]] = {}
    for position, value in enumerate(region.gradients):
        if value >= 0:
            on.setdefault(region.values[value].storage, []).append(position)
    result = {}
    for storage, positions in on.items():
        own = region.storages[storage].kind is StorageKind.GRADIENT
        if not own or not all(region.added[p] for p in positions):
            continue
        makers = [_maker(region, producers, region.gradients[p]) for p in positions]
        for position in positions:
            result[position] = max(makers)  # one that others are views of is handed over with them
    return result


def _maker(region: Region, producers: Mapping[int, int], value: int) -> int:
    index = producers[value]
    while region.ops[index].view:
        value = region.ops[index].inputs[0]
        index = producers[value]
    return index
