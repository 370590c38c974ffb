"""Lower a region's events to a forward and a backward FX graph. No decisions are made here."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch import fx

from gradstow._codes import PLACES
from gradstow.actions import LAYOUTS, layouts
from gradstow.capture import JointGraph, Kernel, OutputRef, expand, is_tangent
from gradstow.ir import Deliver, Free, RegionSchedule, Run, StorageKind
from gradstow.offload import arrived

Victims = dict[fx.Node, fx.Node]


def deliver(_positions: tuple[int, ...], _gradients: tuple[Any, ...]) -> None:
    """A node of a backward graph: hand these gradients over, and go on. What generates code knows how."""


@dataclass(frozen=True)
class Lowered:
    """A region as two graphs.

    Attributes:
        forward: returns the region's outputs, then the saved tensors.
        backward: takes the saved tensors, then the arriving tangents; returns the gradients. Those that
            a ``deliver`` node names have left by then.
        saved: names of the saved tensors, in order; the same in both graphs.
        forward_victims, backward_victims: node → the input whose memory its output takes over.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    saved: tuple[str, ...]
    forward_victims: Victims
    backward_victims: Victims


def lower(joint: JointGraph, schedule: RegionSchedule) -> Lowered:
    """Both graphs of a region, from its events."""
    saved = _saved_values(joint, schedule)
    forward, forward_victims = _forward(joint, schedule, saved)
    backward, backward_victims = _backward(joint, schedule, saved)
    names = tuple(joint.value_nodes[v].name for v in saved)  # type: ignore[union-attr]
    return Lowered(forward, backward, names, forward_victims, backward_victims)


def lower_backward(joint: JointGraph, schedule: RegionSchedule, saved_names: tuple[str, ...]) -> Lowered:
    """Only the backward, for tangents that were not planned: what is saved is given by name."""
    by_name = {node.name: v for v, node in enumerate(joint.value_nodes) if node is not None}
    saved = [by_name[name] for name in saved_names if name in by_name]
    backward, victims = _backward(joint, schedule, saved)
    return Lowered(backward, backward, tuple(n for n in saved_names if n in by_name), {}, victims)


def _saved_values(joint: JointGraph, schedule: RegionSchedule) -> list[int]:
    """Value ids that cross from the forward to the backward: kept storages and inputs that it reads."""
    region = joint.region
    kept = set(schedule.kept)
    base: dict[int, int] = {}
    for op in region.ops:
        if not op.backward:
            for v in op.outputs:
                base.setdefault(region.values[v].storage, v)
    read: set[int] = set()
    for event in schedule.backward:
        if isinstance(event, Run):
            op = region.ops[event.op]
            again = not op.backward and op.rerun is not None
            read.update(op.rerun.inputs if again and op.rerun is not None else op.inputs)
    inputs = [v for v in region.inputs if v in read]
    own = [base[s] for s in sorted(kept) if region.storages[s].kind is StorageKind.ACTIVATION]
    values = inputs + own
    unchecked = [v for v in values if _unchecked(joint, v)]  # AOTAutograd wants these last
    return [v for v in values if v not in unchecked] + unchecked


def _unchecked(joint: JointGraph, value: int) -> bool:
    node = joint.value_nodes[value]
    return node is not None and bool(node.meta.get("saved_tensor_with_no_vc_check", False))


class _Emitter:
    """Copies ops of the joint graph into a new graph, value by value."""

    def __init__(self, joint: JointGraph) -> None:
        self.joint = joint
        self.graph = fx.Graph()
        self.env: dict[int, fx.Node] = {}
        self.values = {n: v for v, n in enumerate(joint.value_nodes) if n is not None}
        self.victims: Victims = {}
        self.delivered: dict[int, fx.Node] = {}
        self.coming: dict[int, fx.Node] = {}  # storage → what is being fetched into it
        self.on: dict[int, list[int]] = {}  # storage → its values
        for value, item in enumerate(joint.region.values):
            self.on.setdefault(item.storage, []).append(value)

    def placeholder(self, source: fx.Node) -> fx.Node:
        node = self.graph.placeholder(source.name)
        node.meta = dict(source.meta)
        if source in self.values:
            self.env[self.values[source]] = node
        return node

    def free(self, storage: int) -> None:
        """What comes after is another life: it must be made anew."""
        self.coming.pop(storage, None)
        for value in self.on.get(storage, ()):
            self.env.pop(value, None)

    def emit(self, event: Run, *, again: bool) -> None:
        op, source = self.joint.region.ops[event.op], self.joint.op_nodes[event.op]
        call = self.joint.reruns.get(source) if again else None
        if not op.view:
            self._await(op.inputs if call is None or op.rerun is None else op.rerun.inputs)
        if call is None:
            node = self.graph.node_copy(source, lambda n: self.env[self.values[n]])
            outputs = [(self._position(v), v) for v in op.outputs]
        else:
            args = tuple(self._argument(a, op.outputs) for a in call.args)
            node = self.graph.call_function(call.target, args)
            made = source.meta["val"]
            vals = [made[i] for i in call.outputs]
            val = vals[0] if len(vals) == 1 else tuple(vals)
            node.meta = {**source.meta, "val": val, LAYOUTS: layouts(args)}
            outputs = [(k, op.outputs[i]) for k, i in enumerate(call.outputs)]
            if call.code in PLACES:
                self.coming[self.joint.region.values[op.outputs[0]].storage] = node
        if isinstance(node.meta.get("val"), (tuple, list)):
            self._unpack(node, outputs)
        elif outputs:
            self.env.setdefault(outputs[0][1], node)
        if event.reuse >= 0:
            self.victims[node] = self.env[event.reuse]
            self.free(self.joint.region.values[event.reuse].storage)

    def _await(self, values: tuple[int, ...]) -> None:
        """Before an op reads them: what is still being fetched must be there."""
        for storage in dict.fromkeys(self.joint.region.values[v].storage for v in values):
            if storage in self.coming:
                self.graph.call_function(arrived, (self.coming.pop(storage),))

    def _position(self, value: int) -> int:
        """Where the value stands among its op's outputs (absent outputs count)."""
        reader = self.joint.value_nodes[value]
        return reader.args[1] if reader is not None and reader.target is operator.getitem else 0

    def _argument(self, argument: Any, outputs: tuple[int, ...]) -> Any:
        if isinstance(argument, fx.Node):
            return self.env[self.values[argument]]
        return self.env[outputs[argument.index]] if isinstance(argument, OutputRef) else argument

    def _unpack(self, node: fx.Node, outputs: list[tuple[int, int]]) -> None:
        for position, value in outputs:
            reader = self.joint.value_nodes[value]
            if reader is None or value in self.env:
                continue
            item = self.graph.call_function(operator.getitem, (node, position))
            item.meta = dict(reader.meta)
            self.env[value] = item

    def deliver(self, event: Deliver) -> None:
        given = tuple(self.env[self.joint.region.gradients[p]] for p in event.gradients)
        self.delivered.update(zip(event.gradients, given, strict=True))
        self.graph.call_function(deliver, (event.gradients, given))

    def module(self, outputs: list[Any]) -> fx.GraphModule:
        output = self.graph.output(tuple(outputs))
        old = self.joint.module.graph.output_node().meta
        if "desc" in old:
            output.meta["desc"] = [None] * len(outputs)
        self.graph.eliminate_dead_code(lambda node: node.is_impure() or node.target is deliver)
        self.graph.lint()
        if any(isinstance(n.target, Kernel) for n in self.graph.nodes):
            return fx.GraphModule(self.joint.module, expand(self.graph))
        return fx.GraphModule(self.joint.module, self.graph)

    def node(self, value: int) -> fx.Node | None:
        return self.env[value] if value >= 0 else None


def _forward(joint: JointGraph, schedule: RegionSchedule, saved: list[int]) -> tuple[fx.GraphModule, Victims]:
    emitter = _Emitter(joint)
    for node in joint.module.graph.find_nodes(op="placeholder"):
        if not is_tangent(node):
            emitter.placeholder(node)
    for event in schedule.forward:
        if isinstance(event, Run):
            emitter.emit(event, again=False)
        elif isinstance(event, Free):
            emitter.free(event.storage)
    outputs = [_output(joint, emitter, position) for position in range(len(joint.region.outputs))]
    return emitter.module(outputs + [emitter.env[v] for v in saved]), emitter.victims


def _output(joint: JointGraph, emitter: _Emitter, position: int) -> Any:
    value = joint.region.outputs[position]
    original = list(joint.module.graph.output_node().args[0])[position]
    return emitter.env[value] if value >= 0 else original


def _backward(joint: JointGraph, schedule: RegionSchedule, saved: list[int]) -> tuple[fx.GraphModule, Victims]:
    emitter = _Emitter(joint)
    for value in saved:
        source = joint.value_nodes[value]
        assert source is not None, "a saved value is read by somebody"
        emitter.placeholder(source)
    for node in joint.module.graph.find_nodes(op="placeholder"):
        if is_tangent(node):
            emitter.placeholder(node)
    for event in schedule.backward:
        if isinstance(event, Run):
            emitter.emit(event, again=not joint.region.ops[event.op].backward)
        elif isinstance(event, Deliver):
            emitter.deliver(event)
        else:
            emitter.free(event.storage)
    results = [emitter.delivered.get(p) or emitter.node(v) for p, v in enumerate(joint.region.gradients)]
    return emitter.module(results), emitter.victims
