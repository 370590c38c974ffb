"""A captured step: what was seen of it, and the graphs that can be made of that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from gradstow._errors import CaptureError, warn_user
from gradstow.actions import Action, Codes, kept_as
from gradstow.capture._casts import shortened
from gradstow.capture._log import RegionRecord, StepLog
from gradstow.capture._model import applied_gradients, device_of, existing_gradients, resident_bytes, weights_signature
from gradstow.capture._normalize import normalize
from gradstow.capture._region import build_region, fingerprint
from gradstow.capture._step import Step
from gradstow.ir import GraphBreak, Region, StepGraph

NO_CODES: Codes = {}


class NothingCaptured(CaptureError):
    """The tracer left out all of the model."""


@dataclass(frozen=True)
class Seen:
    """What a step's forward shows beside its graphs.

    Attributes:
        batch: signature of what the model was called with.
        reserve_bytes: room for a loss that is not known.
        outside: names of ops outside of any graph, and the room for them in bytes.
        breaks: why graphs ended.
        calls: fused kernels outside of any graph, see ``StepGraph.outside_calls``.
    """

    batch: str
    reserve_bytes: int
    outside: tuple[tuple[str, ...], int]
    breaks: tuple[GraphBreak, ...]
    calls: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Captured:
    """A captured step, of which graphs can be made: as it is, or with what actions put in."""

    order: tuple[RegionRecord, ...]
    outputs_held: bool
    existing: frozenset[int]
    applied: Mapping[int, int]
    common: StepGraph

    def told(self, told: bool) -> Captured:
        """The same with a note that the model heard that it was being compiled."""
        if not told:
            return self
        return replace(self, common=replace(self.common, versions={**self.common.versions, "compiling": "told"}))

    @property
    def resident_bytes(self) -> int:
        """What is there before the step starts."""
        return self.common.resident.total

    @property
    def facts(self) -> str:
        """What decides the graphs that can be made, where the plain one does not show it."""
        runs = [(r.roles, sorted(r.changed), r.mask, r.ran_backward, r.compiled.mutated) for r in self.order]
        return repr((runs, sorted(self.existing), sorted(self.applied.items())))

    def graph(self, actions: Sequence[Action] = (), codes: Codes = NO_CODES) -> StepGraph:
        """``codes``: for some regions, by fingerprint, which ops' results are kept as which code, or where."""
        last = max(i for i, r in enumerate(self.order) if r.compiled.managed)
        regions = [
            # the loss itself is always held: backward() is called on it
            self._region(i, r, actions, codes, held=i > last or (i == last and self.outputs_held))
            for i, r in enumerate(self.order)
        ]
        found = _with_origins(_only_last_added(regions, self.order), self.order)
        return replace(self.common, regions=_alike(found))

    def _region(
        self, index: int, record: RegionRecord, actions: Sequence[Action], codes: Codes, *, held: bool
    ) -> Region:
        graph = record.compiled
        print_ = fingerprint(graph.joint, graph.num_forward_outputs)
        chosen = [kept_as(code, names) for code, names in codes.get(print_, {}).items()]
        region = build_region(
            normalize(graph.joint, record.mask if record.ran_backward else None, managed=graph.managed),
            graph.num_forward_outputs,
            [replace(role, added=role.parameter in self.existing) for role in record.roles],
            name=f"region {index}" if graph.managed else "loss",
            mask=record.mask,
            print_=print_,
            held=held,
            managed=graph.managed,
            device=self.common.device,
            changed=_changed(record, self.order),
            mutated=graph.mutated,
            actions=(*actions, *chosen),
            fused=graph.managed and self.common.codegen == "inductor",
        ).region
        applied = tuple(self.applied.get(role.parameter, -1) for role in record.roles)
        return replace(region, applied=applied) if self.applied else region


def captured(
    model: torch.nn.Module,
    step: Step,
    log: StepLog,
    seen: Seen,
    optimizer: tuple[int, int],
    *,
    parts: bool,
    codegen: str = "eager",
) -> Captured:
    device = device_of(model)
    _check_recorded(model, log.order, seen.breaks)
    if not log.complete:
        raise CaptureError(
            f"the loss does not depend on any trainable parameter of {type(model).__name__}, so there is no "
            "backward to plan. Check that the loss uses the model's output and that it is not detached."
        )
    _say_cast_apart(model, log.order)
    applied = applied_gradients(model)
    common = StepGraph(
        regions=(),
        resident=replace(resident_bytes(model, (step.inputs, step.batch), device), optimizer=optimizer[0]),
        device=device,
        reserve_bytes=seen.reserve_bytes,
        optimizer_peak_bytes=0 if applied else optimizer[1],
        outputs_held=step.outputs_held,
        batch=seen.batch,
        model=type(model).__qualname__,
        weights=weights_signature(model),
        breaks=_ending(seen.breaks, log.order),
        outside=seen.outside[0],
        outside_bytes=seen.outside[1],
        outside_calls=seen.calls,
        parts=parts,
        codegen=codegen,
        versions={"torch": torch.__version__},
    )
    return Captured(tuple(log.order), step.outputs_held, existing_gradients(model), applied, common)


def _say_cast_apart(model: torch.nn.Module, order: list[RegionRecord]) -> None:
    """Warn of weights that plain autocast casts once for several graphs, of which each casts its own here."""
    counts = Counter(p for r in order for p in shortened(r.compiled.joint, [role.parameter for role in r.roles]))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    apart = [trained[position] for position, count in sorted(counts.items()) if count > 1]
    if apart:
        warn_user(
            f"gradstow: {', '.join(apart)} of {type(model).__name__} is read under autocast on both sides of a graph "
            "break. Plain PyTorch adds up such gradients in the short type, and here each graph has its own cast, so "
            "last bits may differ. Take the break out, or train with torch.autocast(..., cache_enabled=False)."
        )


def _ending(breaks: tuple[GraphBreak, ...], order: list[RegionRecord]) -> tuple[GraphBreak, ...]:
    """The breaks with the regions that end there."""
    ends = [r.compiled.end for r in order]
    known = dict.fromkeys((*breaks, *(end for end in ends if end is not None)))
    return tuple(replace(b, regions=tuple(i for i, end in enumerate(ends) if end == b)) for b in known)


def _check_recorded(model: torch.nn.Module, order: list[RegionRecord], breaks: tuple[GraphBreak, ...]) -> None:
    if any(r.compiled.managed for r in order):
        return
    raise nothing_captured(model, breaks)


def nothing_captured(model: torch.nn.Module, breaks: tuple[GraphBreak, ...]) -> NothingCaptured:
    """The error for a model of which no part can be planned."""
    reasons = "; ".join(str(b) for b in breaks) or "hooks, or code that PyTorch's tracer leaves out"
    return NothingCaptured(
        f"no part of {type(model).__name__} could be captured, so no budget can hold: {reasons}. It trains as plain "
        "PyTorch; stow sub-modules that do not contain what ends the graphs."
    )


def _only_last_added(regions: Sequence[Region], order: Sequence[RegionRecord]) -> list[Region]:
    """Of a parameter with several uses autograd holds the gradient until the last use has brought its own, which is in
    the first region that uses it. Only one that has that region to itself is given up at once."""
    result: list[Region] = []
    seen: set[int] = set()
    for region, record in zip(regions, order, strict=True):
        used = [role.parameter if v >= 0 else -1 for role, v in zip(record.roles, region.gradients, strict=True)]
        held = seen | {p for p in used if used.count(p) > 1}
        added = tuple(flag and p not in held for flag, p in zip(region.added, used, strict=True))
        result.append(replace(region, added=added))
        seen.update(used)
    return result


def _alike(regions: tuple[Region, ...]) -> tuple[Region, ...]:
    """Regions that run one graph hand their gradients over at the same places, or none of them does."""
    ways: dict[str, set[tuple[bool, ...]]] = {}
    for region in regions:
        ways.setdefault(region.fingerprint, set()).add(region.added)
    return tuple(replace(r, streams=r.streams and len(ways[r.fingerprint]) == 1) for r in regions)


def _with_origins(regions: list[Region], order: Sequence[RegionRecord]) -> tuple[Region, ...]:
    """Turn each boundary storage's origin from (region, output position) into (region, storage)."""
    result: list[Region] = []
    for region in regions:
        storages = list(region.storages)
        for i, storage in enumerate(storages):
            if storage.origin is not None:
                maker, position = storage.origin
                source = result[maker]
                made = source.values[source.outputs[position]].storage
                origin = source.storages[made].origin or (maker, made)
                storages[i] = replace(storage, origin=origin)
        result.append(replace(region, storages=tuple(storages)))
    return tuple(result)


def _changed(record: RegionRecord, order: Sequence[RegionRecord]) -> set[int]:
    """Inputs that change before the backward of any run of this graph: its runs share their decisions."""
    return set().union(*(r.changed for r in order if r.compiled is record.compiled))
