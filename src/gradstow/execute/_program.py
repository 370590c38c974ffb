"""One region, runnable: its forward, its planned backward, and backwards for tangents nobody planned for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from gradstow._errors import CaptureError, warn_user
from gradstow.actions import named
from gradstow.capture import (
    InputRole,
    JointGraph,
    Strides,
    arrived_strides,
    build_region,
    expected_strides,
    is_tangent,
    normalize,
    restrided,
)
from gradstow.execute._inductor import Compiled, compile_graph, donate_nothing
from gradstow.execute._lower import Lowered, Victims, lower, lower_backward
from gradstow.execute._stream import Current
from gradstow.ir import Deliver, GraphBreak, Region, RegionSchedule, Run, StorageKind, just_in_time, write_events

Generate = Callable[[fx.GraphModule, Victims], Callable[[list[Any]], Any]]


@dataclass
class RegionProgram:
    """Compiled code of one region.

    ``generate`` is the code generator (eager here); the graphs that it gets are in ``lowered``. Where the schedule
    delivers gradients, ``groups`` has their positions in the order in which they leave, the rest last. ``changed``:
    inputs that the graph changes in place. ``end`` is the graph break behind the region, if one ended it. ``summed``:
    inputs whose gradient goes to a ``.grad`` → whether it is the sum of several uses.
    """

    raw: fx.GraphModule
    num_forward_outputs: int
    region: Region
    schedule: RegionSchedule
    generate: Generate
    device: str
    changed: tuple[int, ...] = ()
    end: GraphBreak | None = None
    forward: Callable[[list[Any]], Any] = field(init=False)
    lowered: Lowered = field(init=False)
    _backwards: dict[tuple[tuple[bool, ...], Strides], Callable[[list[Any]], Any]] = field(
        init=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        tangents = [n for n in self.raw.graph.find_nodes(op="placeholder") if is_tangent(n)]
        self.planned = self.region.tangent_mask or (True,) * len(tangents)
        self.strides = expected_strides(self.raw)
        joint = self._joint(self.raw, self.planned, fused=self.region.fused)
        self.lowered = lower(joint, self.schedule)
        self.groups = _groups(self.region, self.schedule)
        self.current = Current()
        self._stand_ins: dict[int, torch.Tensor] = {}
        self.unplanned_runs = 0
        inputs = [n.name for n in self.raw.graph.find_nodes(op="placeholder") if not is_tangent(n)]
        self.summed = _summed(self.region)
        self.saved_inputs = [i for i, name in enumerate(inputs) if name in self.lowered.saved]

    compiled: tuple[Compiled, Compiled] | None = field(init=False, default=None)

    def build_forward(self, inputs: Sequence[Any]) -> None:
        """Make its code; ``inputs`` are fakes of what will come."""
        if self.region.fused:
            self.forward = compile_graph(self.lowered.forward, inputs, backward=False, free=self._free())
        else:
            self.forward = self.generate(self.lowered.forward, self.lowered.forward_victims)

    def _free(self) -> list[int]:
        """Positions of what the forward saves for the backward in any layout.

        Not where the backward goes by its memory, and not what was given: it would be copied.
        """
        strided = self.lowered.backward.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default)
        fixed = {source.name for node in strided for source in node.all_input_nodes}
        fixed |= {node.name for node in self.raw.graph.find_nodes(op="placeholder")}
        first = self.num_forward_outputs
        return [first + i for i, name in enumerate(self.lowered.saved) if name not in fixed]

    def build_backward(self, inputs: Sequence[Any], names: Sequence[str]) -> None:
        if self.region.fused:
            there = dict(zip(names, inputs, strict=True))
            given = [there[n.name] for n in self.lowered.backward.graph.find_nodes(op="placeholder")]
            compiled = compile_graph(self.lowered.backward, given, backward=True)
            donate_nothing()
            assert isinstance(self.forward, Compiled), "the forward is compiled first"
            self.compiled = self.forward, compiled
            self._backwards[self.planned, self.strides] = compiled
        else:
            code = self.generate(self.lowered.backward, self.lowered.backward_victims)
            self._backwards[self.planned, self.strides] = code

    def run_backward(self, args: list[Any]) -> Any:
        """Gradients from saved tensors and tangents; tangents may be None."""
        saved = args[: len(self.lowered.saved)]
        tangents = args[len(self.lowered.saved) :]
        args.clear()
        mask = tuple(t is not None for t in tangents)
        if not any(mask):
            return [None] * len(self.region.gradients)
        kind = mask, arrived_strides(tangents, self.strides)
        if kind not in self._backwards:
            self._backwards[kind] = self._unplanned(*kind)
        if kind != (self.planned, self.strides):
            self.unplanned_runs += 1
        saved += [t for t in tangents if t is not None]
        del tangents
        result = self._backwards[kind](saved)
        if kind != (self.planned, self.strides) or not self.groups:
            return result
        handover = self.current.handover
        assert handover is not None, "its forward made one"
        return handover.begin(result, self._stand_in, len(self.region.gradients))

    def _stand_in(self, position: int) -> torch.Tensor:
        """What the region's node returns for a gradient that comes later: zeros that take no memory."""
        if position not in self._stand_ins:
            places = [n for n in self.raw.graph.find_nodes(op="placeholder") if not is_tangent(n)]
            val = places[position].meta["val"]
            zero = torch.zeros((), dtype=val.dtype, device=val.device)
            self._stand_ins[position] = zero.expand(val.shape)
        return self._stand_ins[position]

    def _joint(self, raw: fx.GraphModule, mask: Sequence[bool], *, fused: bool) -> JointGraph:
        module = normalize(raw, mask)
        return build_region(
            module,
            self.num_forward_outputs,
            [_role(self.region, v) for v in self.region.inputs],
            mask=mask,
            held=self.region.held,
            device=self.device,
            changed=self.region.late,
            actions=named(self.region.actions),
            fused=fused,
        )

    def _unplanned(self, mask: tuple[bool, ...], strides: Strides) -> Callable[[list[Any]], Any]:
        """A backward for other tangents, or other layouts of them, from the tensors that the plan saved."""
        raw = self.raw if strides == self.strides else restrided(self.raw, strides)
        joint = self._joint(raw, mask, fused=False)  # other gradients would make other kernels, of other values
        region = joint.region
        saved = set(self.lowered.saved)
        here = {n.name: region.values[v].storage for v, n in enumerate(joint.value_nodes) if n is not None}
        there = {here[name] for name in saved if name in here}
        schedule = just_in_time(region, there) if self.region.fused else write_events(region, self._reruns_in(region))
        lost = [s for s in (*schedule.kept, *_read_from_outside(region, schedule)) if s not in there]
        if lost:
            value = next(v for v in region.values if v.storage == lost[0])
            raise CaptureError(
                f"a gradient arrived for an output whose gradient the plan did not expect, and {value.name} "
                "was not kept for it. Plan with the loss that is really used (loss=...), or run the step "
                "under gs.plain()."
            )
        lowered = lower_backward(joint, schedule, self.lowered.saved)
        if self.region.fused:
            _reshape(lowered.backward.graph)  # what was saved may lie otherwise than it was traced
            warn_user(
                "gradstow: an output of the compiled model got no gradient, or one in another layout than planned. Its "
                "backward is generated anew, without fused kernels, and may exceed the budget. Plan with the loss that "
                "is really used (loss=...), or use codegen='eager'."
            )
        code = self.generate(lowered.backward, lowered.backward_victims)
        if lowered.saved == self.lowered.saved:
            return code
        wanted = [i for i, name in enumerate(self.lowered.saved) if name in lowered.saved]
        total = len(self.lowered.saved)

        def run(args: list[Any]) -> Any:
            chosen = [args[i] for i in wanted] + args[total:]
            args.clear()
            return code(chosen)

        return run

    def _reruns_in(self, region: Region) -> dict[int, list[int]]:
        """The planned reruns, before the same backward ops of another form of the region, or the next that is left."""
        there = {op.name: index for index, op in enumerate(region.ops)}
        result: dict[int, list[int]] = {}
        waiting: list[int] = []
        for event in self.schedule.backward:
            op = self.region.ops[event.op] if isinstance(event, Run) else None
            if op is None or op.view or op.name not in there:
                continue
            if not op.backward:
                waiting.append(there[op.name])
            elif waiting:
                result[there[op.name]] = waiting
                waiting = []
        return result


def _summed(region: Region) -> dict[int, bool]:
    read = [v for op in region.ops if not op.backward for v in op.inputs]
    ends = enumerate(zip(region.inputs, region.gradients, region.accumulated, strict=True))
    return {i: read.count(value) > 1 for i, (value, gradient, ends_here) in ends if gradient >= 0 and ends_here}


def _reshape(graph: fx.Graph) -> None:
    """Let views be copies where they must."""
    for view in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
        for node in graph.find_nodes(op="call_function", target=view):
            node.target = torch.ops.aten.reshape.default


def _groups(region: Region, schedule: RegionSchedule) -> list[tuple[int, ...]]:
    early = [event.gradients for event in schedule.backward if isinstance(event, Deliver)]
    left = {p for positions in early for p in positions}
    rest = tuple(p for p, v in enumerate(region.gradients) if v >= 0 and p not in left)
    return [*early, rest] if early else []


def _read_from_outside(region: Region, schedule: RegionSchedule) -> list[int]:
    """Storages of the region's inputs that its backward reads."""
    inputs = set(region.inputs)
    found: dict[int, None] = {}
    for event in schedule.backward:
        if isinstance(event, Run):
            op = region.ops[event.op]
            again = op.rerun if not op.backward else None
            read = op.inputs if again is None else again.inputs
            found.update((region.values[v].storage, None) for v in read if v in inputs)
    return list(found)


def _role(region: Region, value: int) -> InputRole:
    storage = region.storages[region.values[value].storage]
    position = region.inputs.index(value)
    return InputRole(
        resident=storage.kind is StorageKind.RESIDENT,
        origin=storage.origin,
        accumulates=position < len(region.accumulated) and region.accumulated[position],
        added=position < len(region.added) and region.added[position],
    )
