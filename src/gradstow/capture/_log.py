"""What ran in one step: which graph, fed by whom, and which gradients arrived. Holds no tensor."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from gradstow.capture._region import InputRole
from gradstow.ir import GraphBreak


@dataclass(frozen=True, eq=False)
class CompiledGraph:
    """One graph that AOTAutograd made. A loop over blocks may run it many times in one step.

    ``end`` is the graph break behind it, if one ended it.
    """

    joint: fx.GraphModule
    num_forward_outputs: int
    managed: bool = True
    mutated: tuple[int, ...] = ()  # inputs with a gradient that the forward changes in place
    end: GraphBreak | None = None


@dataclass
class RegionRecord:
    """One run of a graph within the step. ``changed``: inputs that were changed in place between its two passes."""

    compiled: CompiledGraph
    roles: list[InputRole]
    versions: list[tuple[weakref.ref[torch.Tensor], int] | None]
    changed: set[int] = field(default_factory=set)
    mask: list[bool] = field(default_factory=list)
    ran_backward: bool = False


class StepLog:
    """Runs of graphs in the order of their forwards. ``parameters``: the model's trainable ones, in order.

    Tensors are told apart by weak references to their storages, which keep an address from being used again.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.order: list[RegionRecord] = []
        self._parameters = {_ref(p): position for position, p in enumerate(parameters)}
        self._received: dict[StorageWeakRef, int] = {}  # storages that no graph made → bytes
        self._made: dict[StorageWeakRef, tuple[int, int]] = {}  # storage → (region, output) that made it
        self._saved_by: dict[StorageWeakRef, int] = {}  # storage → region whose forward made it

    def forward(self, graph: CompiledGraph, call: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Run a boxed forward and note it."""
        index = len(self.order)
        self.order.append(RegionRecord(graph, [self._role(a) for a in args], [None] * len(args)))
        given = [weakref.ref(a) if isinstance(a, torch.Tensor) else None for a in args]
        outside = {_ref(a) for a in args if isinstance(a, torch.Tensor)}
        outputs = call(args)
        self.order[index].versions = [_version(ref) for ref in given]  # with the graph's own changes
        for position, item in enumerate(outputs):
            if isinstance(item, torch.Tensor) and _ref(item) not in outside:
                self._saved_by[_ref(item)] = index
                if position < graph.num_forward_outputs:
                    self._made.setdefault(_ref(item), (index, position))
        return outputs

    def backward(self, graph: CompiledGraph, saved: Sequence[Any], mask: Sequence[bool]) -> None:
        """Note that a graph's backward runs, for these saved tensors and with these tangents."""
        record = self._record_of(graph, saved)
        if record is not None:
            record.ran_backward, record.mask = True, list(mask)
            record.changed = {
                i for i, v in enumerate(record.versions) if v is not None and _version(v[0]) not in (v, None)
            }

    @property
    def complete(self) -> bool:
        """Whether a backward of the model has run, so that there is something to plan."""
        return any(r.ran_backward and r.compiled.managed for r in self.order)

    @property
    def received(self) -> dict[int, int]:
        """Storage → bytes of what graphs took in and no graph made: weights, batch, what ran outside."""
        return {ref.cdata: nbytes for ref, nbytes in self._received.items()}

    def _record_of(self, graph: CompiledGraph, saved: Sequence[Any]) -> RegionRecord | None:
        """The run whose backward this is: the one that saved these tensors, else the last one still open."""
        runs = [i for i, r in enumerate(self.order) if r.compiled is graph and not r.ran_backward]
        for item in saved:
            if isinstance(item, torch.Tensor) and self._saved_by.get(_ref(item)) in runs:
                return self.order[self._saved_by[_ref(item)]]
        return self.order[runs[-1]] if runs else None

    def _role(self, argument: Any) -> InputRole:
        if not isinstance(argument, torch.Tensor):
            return InputRole()
        key = _ref(argument)
        if key in self._made:
            return InputRole(resident=False, origin=self._made[key])
        self._received[key] = argument.untyped_storage().nbytes()
        parameter = self._parameters.get(key, -1)
        return InputRole(
            accumulates=parameter >= 0 or (argument.is_leaf and argument.requires_grad), parameter=parameter
        )


def _version(ref: weakref.ref[torch.Tensor] | None) -> tuple[weakref.ref[torch.Tensor], int] | None:
    tensor = None if ref is None else ref()
    return None if ref is None or tensor is None else (ref, tensor._version)


def _ref(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
