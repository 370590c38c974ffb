"""The captured training step as plain data: storages, values, ops, regions. No torch in here.

Ids are positions: ``region.ops[3]`` is op 3 of that region. Bytes belong to storages; views and
in-place results share one, so nothing is counted twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class StorageKind(StrEnum):
    """Who owns a storage, which decides how long it lives."""

    RESIDENT = "resident"  # parameter, buffer or batch: alive before, during and after the step
    BOUNDARY = "boundary"  # made by an earlier region, read by this one
    ACTIVATION = "activation"  # made by a forward op
    TANGENT = "tangent"  # gradient that enters the region's backward
    GRADIENT = "gradient"  # made by a backward op


@dataclass(frozen=True, slots=True)
class Storage:
    """A block of memory.

    ``origin`` is (region, storage) of the maker for a boundary storage. ``plain_nbytes`` is what plain
    PyTorch needs for the same thing, where that differs (its CPU dropout keeps a float mask), else -1.
    """

    nbytes: int
    kind: StorageKind
    origin: tuple[int, int] | None = None
    plain_nbytes: int = -1


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor: a view on a storage."""

    name: str
    storage: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Rerun:
    """A cheaper or purer way to make some of an op's outputs again (BatchNorm without statistics).

    ``code``: name of the code that is kept of the first output, which is never kept itself then, or "".
    """

    target: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    signature: str
    code: str = ""


@dataclass(frozen=True, slots=True)
class PlainForm:
    """An op as plain PyTorch runs it: what it reads, and its key in the cost table."""

    inputs: tuple[int, ...]
    signature: str


@dataclass(frozen=True, slots=True)
class Op:
    """One call in the captured graph.

    Attributes:
        inputs, outputs: value ids. Several outputs are one unit: they are made together.
        backward: whether the op belongs to the backward part.
        view: makes no storage of its own and costs nothing.
        pinned: why the op may never run twice, or "" (random numbers, routing, side effects).
        writes: storages that the op changes in place (BatchNorm statistics).
        overwrites: input values whose dying storage the first output may take over.
        rerun: how to make its outputs again; None means by the op itself.
        lazy: runs in the forward only where something that is kept, or read there, comes of it; plain PyTorch has none.
        plain: plain PyTorch's op, where this one stands for it.
        scope: ops with the same number (0 and up) run inside one call of plain PyTorch (a loss function, a node of
            autograd), which gives nothing back before it returns; -1 for an op that runs alone.
        signature: canonical JSON of the call: target, tensor layouts, constants. Key of the cost table.
        module, source: where in the user's model it comes from.
    """

    name: str
    target: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    backward: bool = False
    view: bool = False
    pinned: str = ""
    writes: tuple[int, ...] = ()
    overwrites: tuple[int, ...] = ()
    rerun: Rerun | None = None
    lazy: bool = False
    plain: PlainForm | None = None
    scope: int = -1
    signature: str = ""
    module: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Region:
    """One captured graph: a forward part and a backward part.

    Attributes:
        ops: in the order of the captured graph; all forward ops come before all backward ops.
        inputs: value ids that come from outside, in call order.
        outputs: value ids that the forward hands out, in order; -1 for a constant.
        tangents: value ids of the output gradients that really arrive.
        tangent_mask: for each gradient that could arrive, whether it does in this step.
        gradients: value ids that the backward hands out; -1 for None.
        accumulated: for each gradient, whether it ends in a ``.grad``, and so lives to the end of the step where it is
            the first one there.
        added: for each gradient, whether that ``.grad`` exists already: then it is added to it, and given up.
        applied: for each gradient that an optimizer inside the backward applies and frees as soon as it is handed over,
            the bytes that this takes beside it, else -1; () where no gradient is.
        streams: whether gradients can be handed over while the backward still runs (see ``deliveries``).
        held: whether the caller still holds the outputs while the backward runs, so that keeping them is free.
        managed: False for code that runs as plain PyTorch (a loss outside the model).
        fingerprint: structural hash of the captured graph; what runs must have the same.
        actions: names of the actions that put ops into it.
        late: positions of inputs that something changes before the backward runs, where the graph is fused.
        fused: whether its ops are kernels of a compiler, and no single calls.
    """

    name: str
    storages: tuple[Storage, ...]
    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    tangents: tuple[int, ...]
    tangent_mask: tuple[bool, ...]
    gradients: tuple[int, ...]
    accumulated: tuple[bool, ...]
    added: tuple[bool, ...]
    applied: tuple[int, ...] = ()
    streams: bool = True
    held: bool = False
    managed: bool = True
    fingerprint: str = ""
    actions: tuple[str, ...] = ()
    fused: bool = False
    late: tuple[int, ...] = ()

    def producers(self) -> dict[int, int]:
        """Value id → id of the op that makes it; inputs and tangents are absent."""
        return {value: index for index, op in enumerate(self.ops) for value in op.outputs}


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes alive on the device when the step starts, by what they are for."""

    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0
    batch: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.buffers + self.gradients + self.optimizer + self.batch


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """A place where the captured graph ends and another begins; ``regions`` end there."""

    reason: str
    source: str
    regions: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.reason} ({self.source})" if self.source else self.reason


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A whole training step: all forwards in order, then all backwards in reverse.

    Attributes:
        regions: in forward order; a loss outside the model is the last one, unmanaged.
        resident: what is alive when the step starts.
        reserve_bytes: room for a loss that was not captured, held between forward and backward.
        optimizer_peak_bytes: working memory of the optimizer's step, above its state and the gradients.
        outputs_held: whether the user's loop still holds the model's output while the backward runs.
        device: "cpu" or "cuda".
        batch: signature of the batch, for the plan's key.
        model: name of the model's class; ``weights`` a signature of its parameters' and buffers' layouts.
        breaks: graph breaks, in order.
        outside: names of ops that ran outside of any graph and keep tensors for the backward.
        outside_bytes: room for them, counted from the start of the step to the end of its backward.
        outside_calls: fused kernels that ran outside of any graph: the signature of their training step for the cost
            table, and the part of ``outside_bytes`` that stands for what they keep.
        parts: whether layers were captured on their own, because the code that calls them could not be.
        codegen: "eager", or "inductor" where kernels are compiled.
        versions: torch and gradstow versions that captured it.
    """

    regions: tuple[Region, ...]
    resident: Resident
    device: str = "cpu"
    reserve_bytes: int = 0
    optimizer_peak_bytes: int = 0
    outputs_held: bool = True
    batch: str = ""
    model: str = ""
    weights: str = ""
    breaks: tuple[GraphBreak, ...] = ()
    outside: tuple[str, ...] = ()
    outside_bytes: int = 0
    outside_calls: tuple[tuple[str, int], ...] = ()
    parts: bool = False
    codegen: str = "eager"
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        text = json.dumps([[r.fingerprint, r.tangent_mask, r.managed] for r in self.regions])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> StepGraph:
        return StepGraph(
            regions=tuple(_region(r) for r in data["regions"]),
            resident=Resident(**data["resident"]),
            device=data["device"],
            reserve_bytes=data["reserve_bytes"],
            optimizer_peak_bytes=data["optimizer_peak_bytes"],
            outputs_held=data["outputs_held"],
            batch=data["batch"],
            model=data["model"],
            weights=data["weights"],
            breaks=tuple(GraphBreak(**_tuples(b)) for b in data["breaks"]),
            outside=tuple(data["outside"]),
            outside_bytes=data["outside_bytes"],
            outside_calls=tuple((text, nbytes) for text, nbytes in data["outside_calls"]),
            parts=data["parts"],
            codegen=data["codegen"],
            versions=dict(data["versions"]),
        )


def _tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}


def _op(data: Mapping[str, Any]) -> Op:
    fields = _tuples(data)
    fields["rerun"] = None if fields["rerun"] is None else Rerun(**_tuples(fields["rerun"]))
    fields["plain"] = None if fields["plain"] is None else PlainForm(**_tuples(fields["plain"]))
    return Op(**fields)


def _storage(data: Mapping[str, Any]) -> Storage:
    origin = data["origin"]
    kind = StorageKind(data["kind"])
    return Storage(data["nbytes"], kind, None if origin is None else tuple(origin), data["plain_nbytes"])


def _region(data: Mapping[str, Any]) -> Region:
    fields = _tuples(data)
    fields["storages"] = tuple(_storage(s) for s in data["storages"])
    fields["values"] = tuple(Value(**_tuples(v)) for v in data["values"])
    fields["ops"] = tuple(_op(o) for o in data["ops"])
    return Region(**fields)
