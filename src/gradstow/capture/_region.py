"""Turn a normalised joint graph into an ``ir.Region`` and remember which node each op and value is."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from gradstow._codes import CODES
from gradstow._ops import keep_mask, masked_scale
from gradstow._signature import encode
from gradstow.actions import Action, Offers
from gradstow.capture._compiled import called_with, note_layouts
from gradstow.capture._fuse import Kernel, fuse
from gradstow.capture._gradients import copy_gradients
from gradstow.capture._inplace import overwritable
from gradstow.capture._normalize import is_tangent, written
from gradstow.capture._places import module_path, source_line
from gradstow.capture._rerun import OutputRef, RerunCall, rerun_call
from gradstow.ir import Op, PlainForm, Region, Rerun, Storage, StorageKind, Value

# integer decisions that near-equal scores could flip: they are small, and kept
_ROUTING = {
    "topk", "sort", "argsort", "argmax", "argmin", "nonzero", "bincount", "kthvalue", "mode", "unique_dim",
    "_unique2", "multinomial", "msort", "median", "nanmedian", "searchsorted", "bucketize",
}  # fmt: skip


@dataclass(frozen=True)
class JointGraph:
    """A normalised joint graph next to its Region.

    Attributes:
        module: the graph; its nodes run the ops.
        op_nodes: op id → the node that runs it.
        value_nodes: value id → the node that holds it, or None for an output that nobody reads.
        reruns: op node → the other form in which it runs again; absent where that is its own.
    """

    module: fx.GraphModule
    region: Region
    op_nodes: tuple[fx.Node, ...]
    value_nodes: tuple[fx.Node | None, ...]
    reruns: Mapping[fx.Node, RerunCall]


@dataclass(frozen=True, slots=True)
class InputRole:
    """Where a graph input comes from: resident (parameter, buffer, batch) or an earlier region's storage.

    ``accumulates``: its gradient ends in a ``.grad``; ``added``: in one that exists already. ``parameter``: its
    position among the model's trainable parameters, or -1.
    """

    resident: bool = True
    origin: tuple[int, int] | None = None
    accumulates: bool = False
    added: bool = False
    parameter: int = -1


def fingerprint(joint: fx.GraphModule, num_forward_outputs: int) -> str:
    """Structural hash: ops, their arguments, and the layouts of what goes in. Names do not count."""
    order = {n: i for i, n in enumerate(joint.graph.nodes)}
    lines = [str(num_forward_outputs)]
    for node in joint.graph.nodes:
        args = fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{order[n]}")
        layout = _layout(node.meta.get("val")) if node.op == "placeholder" else ""
        target = "" if node.op == "placeholder" else str(node.target)
        lines.append(f"{node.op} {target} {args} {layout}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:24]


def build_region(
    module: fx.GraphModule,
    num_forward_outputs: int,
    roles: Sequence[InputRole],
    *,
    name: str = "region",
    mask: Sequence[bool] = (),
    print_: str = "",
    held: bool = False,
    managed: bool = True,
    device: str = "cpu",
    changed: Collection[int] = (),
    mutated: Collection[int] = (),
    actions: Sequence[Action] = (),
    fused: bool = False,
) -> JointGraph:
    """The Region of a normalised joint graph; ``roles`` tells for each graph input where it comes from.

    ``changed``: inputs that something else changes in place before the backward runs; ``mutated``: those with a
    gradient that the forward itself changes. ``actions`` put in what they can; the region names them.
    ``fused``: ops are the kernels that a compiler will make.
    """
    if fused:
        module = fuse(module, changed)
        note_layouts(module)
    copy_gradients(module.graph, num_forward_outputs, roles)
    offers = Offers(module.graph, *_parts(module.graph, num_forward_outputs), signature)
    for action in actions if managed else ():
        action.apply(offers)
    module.graph.lint()
    built = _Builder(module, offers, num_forward_outputs, roles, device).build(name, tuple(mask), print_)
    region = built.region
    ops = region.ops if managed else _scoped(region.ops, built.op_nodes)
    late = {region.values[region.inputs[i]].storage for i in changed}
    ops = _pin_readers(ops, region.values, late, "reads what is changed before the backward")
    streams = not fused and _can_stream(region, mutated)
    names = tuple(action.name for action in actions)
    region = replace(region, ops=ops, held=held, managed=managed, streams=streams, actions=names, fused=fused)
    region = replace(region, late=tuple(sorted(changed)) if fused else ())
    return replace(built, region=region)


def _parts(graph: fx.Graph, num_outputs: int) -> tuple[set[fx.Node], list[Any]]:
    """The backward's nodes, and what the forward hands out."""
    outputs = list(graph.output_node().args[0])[:num_outputs]
    return _backward_nodes(graph, outputs), outputs


def _can_stream(region: Region, mutated: Collection[int]) -> bool:
    """Whether the inputs that get a gradient can pass through other autograd nodes on their way in: none is changed
    in place or handed out again, where its gradient would mix with what comes from elsewhere."""
    outputs = {region.values[v].storage for v in region.outputs if v >= 0}
    passing = [i for i, v in enumerate(region.gradients) if v >= 0]
    return not any(i in mutated or region.values[region.inputs[i]].storage in outputs for i in passing)


def _pin_readers_of_changed(ops: tuple[Op, ...], values: Sequence[Value]) -> tuple[Op, ...]:
    """Buffers that the forward changes (counters, moving averages) have other values when the backward runs."""
    changed = {s for op in ops if not op.backward for s in op.writes}
    return _pin_readers(ops, values, changed, "reads what the forward changes")


def _pin_decisions(ops: tuple[Op, ...], values: Sequence[Value]) -> tuple[Op, ...]:
    """Masks and indices that are made of floats: what these are made of again may be near them only."""
    result = []
    for op in ops:
        read = any(values[v].dtype in _FLOATS for v in op.inputs)
        decides = read and any(values[v].dtype not in _FLOATS for v in op.outputs)
        free = not (op.backward or op.view or op.pinned or op.rerun is not None)
        result.append(replace(op, pinned="decides by what may be kept as a code") if decides and free else op)
    return tuple(result)


_FLOATS = {"float64", "float32", "float16", "bfloat16", "complex128", "complex64"}


def _pin_readers(ops: tuple[Op, ...], values: Sequence[Value], changed: set[int], why: str) -> tuple[Op, ...]:
    result = []
    for op in ops:
        reads = op.inputs if op.rerun is None else op.rerun.inputs
        late = not op.backward and not op.view and any(values[v].storage in changed for v in reads)
        result.append(replace(op, pinned=why) if late and not op.pinned else op)
    return tuple(result)


def _scoped(ops: tuple[Op, ...], nodes: tuple[fx.Node, ...]) -> tuple[Op, ...]:
    """Ops of code that runs as plain PyTorch, each with its scope.

    The function that computes the forward may hold whatever it made until it returns; in the backward a node
    of autograd holds its temporaries until it is done.
    """
    result, scope, call = [], 0, -1
    for op, node in zip(ops, nodes, strict=True):
        if op.backward and node.meta.get("seq_nr") != call:
            scope, call = scope + 1, node.meta.get("seq_nr")
        result.append(replace(op, scope=scope))
    return tuple(result)


class _Builder:
    def __init__(
        self, module: fx.GraphModule, offers: Offers, num_outputs: int, roles: Sequence[InputRole], device: str
    ) -> None:
        self.module, self.offers, self.roles, self.device = module, offers, roles, device
        outputs = list(module.graph.output_node().args[0])
        self.outputs, self.gradients = outputs[:num_outputs], outputs[num_outputs:]
        self.storages: list[Storage] = []
        self.storage_ids: dict[StorageWeakRef, int] = {}
        self.values: list[Value] = []
        self.value_ids: dict[fx.Node, int] = {}
        self.value_nodes: list[fx.Node | None] = []
        self.backward = offers.backward

    def build(self, name: str, mask: tuple[bool, ...], print_: str) -> JointGraph:
        placeholders = list(self.module.graph.find_nodes(op="placeholder"))
        primals = [p for p in placeholders if not is_tangent(p)]
        tangents = [p for p in placeholders if is_tangent(p)]
        for node, role in zip(primals, self.roles, strict=True):
            kind = StorageKind.RESIDENT if role.resident else StorageKind.BOUNDARY
            self._add(node, node.name, node.meta.get("val"), kind, role.origin)
        for node in tangents:
            self._add(node, node.name, node.meta["val"], StorageKind.TANGENT)
        nodes = [n for n in self.module.graph.nodes if n.op in ("call_function", "get_attr")]
        calls = [n for n in nodes if n.target is not operator.getitem]
        ordered = [n for n in calls if n not in self.backward] + [n for n in calls if n in self.backward]
        reruns = {n: rerun_call(n, self.offers.decodes.get(n)) for n in ordered if n not in self.backward}
        self.reruns = {n: call for n, call in reruns.items() if call is not None}
        made = [self._op(node) for node in ordered]
        # only now, when a code has its number, too, that is made after what it is the code of
        again = [replace(op, rerun=self._rerun(n, op.outputs)) for n, op in zip(ordered, made, strict=True)]
        ops = _pin_readers_of_changed(tuple(again), self.values)
        lossy = any(decode.code in CODES for decode in self.offers.decodes.values())
        ops = _pin_decisions(ops, self.values) if lossy else ops
        region = Region(
            name=name,
            storages=tuple(self.storages),
            values=tuple(self.values),
            ops=ops,
            inputs=tuple(self.value_ids[n] for n in primals),
            outputs=tuple(self._id(n) for n in self.outputs),
            tangents=tuple(self.value_ids[n] for n in tangents),
            tangent_mask=mask,
            gradients=tuple(self._id(n) for n in self.gradients),
            accumulated=tuple(role.accumulates for role in self.roles),
            added=tuple(role.accumulates and role.added for role in self.roles),
            fingerprint=print_,
        )
        return JointGraph(self.module, region, tuple(ordered), tuple(self.value_nodes), self.reruns)

    def _id(self, node: Any) -> int:
        return self.value_ids[node] if isinstance(node, fx.Node) else -1

    def _storage(
        self, node: fx.Node | None, val: torch.Tensor, kind: StorageKind, origin: tuple[int, int] | None
    ) -> int:
        ref = StorageWeakRef(val.untyped_storage())
        if ref not in self.storage_ids:
            here = val.device.type == self.device
            nbytes = held_nbytes(node, val) if here else 0
            self.storage_ids[ref] = len(self.storages)
            self.storages.append(Storage(nbytes, kind, origin, plain_nbytes(node) if here else -1))
        return self.storage_ids[ref]

    def _add(
        self,
        node: fx.Node | None,
        name: str,
        val: Any,
        kind: StorageKind,
        origin: tuple[int, int] | None = None,
    ) -> int:
        if isinstance(val, torch.Tensor):
            storage = self._storage(node, val, kind, origin)
            value = Value(name, storage, tuple(int(s) for s in val.shape), str(val.dtype).removeprefix("torch."))
        else:
            self.storages.append(Storage(0, kind, None))
            value = Value(name, len(self.storages) - 1, (), type(val).__name__)
        self.values.append(value)
        self.value_nodes.append(node)
        if node is not None:
            self.value_ids[node] = len(self.values) - 1
        return len(self.values) - 1

    def _op(self, node: fx.Node) -> Op:
        backward = node in self.backward
        inputs = tuple(dict.fromkeys(self.value_ids[n] for n in node.all_input_nodes))
        read = {self.values[v].storage for v in inputs}
        kind = StorageKind.GRADIENT if backward else StorageKind.ACTIVATION
        if node.op == "get_attr":  # a constant of the graph, which the graph itself holds
            kind = StorageKind.RESIDENT
        outputs = self._make_outputs(node, kind)
        made = {self.values[v].storage for v in outputs} - read
        view = bool(outputs) and not made and not written(node)
        return Op(
            name=node.name,
            target=str(node.target),
            inputs=inputs,
            outputs=outputs,
            backward=backward,
            view=view or node.op == "get_attr",
            pinned="" if node in self.reruns else _pinned(node),
            writes=tuple(self.values[self.value_ids[n]].storage for n in written(node)),
            overwrites=tuple(self.value_ids[n] for n in self._overwritable(node)),
            signature="" if node.op == "get_attr" else signature(node),
            lazy=node in self.offers.lazy,
            plain=self._plain_form(node),
            module=module_path(node),
            source=source_line(node),
        )

    def _overwritable(self, node: fx.Node) -> tuple[fx.Node, ...]:
        if not isinstance(node.target, Kernel):
            return overwritable(node)
        # compiled code writes over what it made itself, not over what was saved for it
        return tuple(n for n in node.target.overwritable(node) if (n in self.backward) == (node in self.backward))

    def _plain_form(self, node: fx.Node) -> PlainForm | None:
        if node not in self.offers.plain:
            return None
        read, key = self.offers.plain[node]
        return PlainForm(tuple(dict.fromkeys(self.value_ids[n] for n in read)), key)

    def _make_outputs(self, node: fx.Node, kind: StorageKind) -> tuple[int, ...]:
        val = node.meta.get("val")
        if val is None and node.op == "get_attr":
            val = getattr(self.module, str(node.target))
            node.meta["val"] = val
        if not isinstance(val, (tuple, list)):
            return () if val is None else (self._add(node, node.name, val, kind),)
        readers = {u.args[1]: u for u in node.users if u.target is operator.getitem}
        ids: list[int] = []
        for index, item in enumerate(val):
            if isinstance(item, torch.Tensor) or index in readers:
                ids.append(self._add(readers.get(index), f"{node.name}.{index}", item, kind))
        return tuple(ids)

    def _rerun(self, node: fx.Node, outputs: tuple[int, ...]) -> Rerun | None:
        call = self.reruns.get(node)
        if call is None:
            return None
        made = node.meta["val"]
        inputs = []
        for arg in call.args:
            if isinstance(arg, fx.Node):
                inputs.append(self.value_ids[arg])
            elif isinstance(arg, OutputRef):
                inputs.append(outputs[arg.index])
        args = [made[a.index] if isinstance(a, OutputRef) else a for a in call.args]
        return Rerun(
            target=str(call.target),
            inputs=tuple(inputs),
            outputs=tuple(outputs[i] for i in call.outputs),
            signature=encode(str(call.target), _values(args), {}),
            code=call.code,
        )


# torch computes these unreduced, and the reduced result stays on the storage of that size
_UNREDUCED = {
    torch.ops.aten.binary_cross_entropy.default,
    torch.ops.aten.col2im.default,  # resizes what it allocates like its input
    torch.ops.aten.mse_loss.default,
    torch.ops.aten.smooth_l1_loss.default,
    torch.ops.aten.soft_margin_loss.default,
}


def held_nbytes(node: fx.Node | None, val: torch.Tensor) -> int:
    """Bytes of the storage that the real op leaves its result on, which fakes do not tell for some losses."""
    nbytes = int(val.untyped_storage().nbytes())
    if node is None or node.target not in _UNREDUCED:
        return nbytes
    return max(nbytes, *(i.meta["val"].numel() * val.element_size() for i in node.all_input_nodes))


def plain_nbytes(node: fx.Node | None) -> int:
    """Bytes of the mask that eager's dropout on CPU keeps: floats where ours are bools; -1 for other nodes."""
    if node is None or node.target is not keep_mask:
        return -1
    products = [u.meta["val"] for u in node.users if u.target is masked_scale]
    mask = node.meta["val"]
    if not products:
        return -1
    return int(mask.numel()) * products[0].element_size()


def signature(node: fx.Node) -> str:
    """The node's key in the cost table."""
    if isinstance(node.target, Kernel):
        return node.target.signature(node)
    if not isinstance(node.target, torch._ops.OpOverload):
        return ""
    return encode(str(node.target), called_with(node) or _values(node.args), _values(node.kwargs))


def _values(item: Any) -> Any:
    if isinstance(item, fx.Node):
        return item.meta.get("val")
    if isinstance(item, (list, tuple)):
        return [_values(i) for i in item]
    if isinstance(item, dict):
        return {k: _values(v) for k, v in item.items()}
    return item


def _backward_nodes(graph: fx.Graph, outputs: Sequence[Any]) -> set[fx.Node]:
    """Nodes of the backward part: what hangs on a tangent, and what only the backward formula computes."""
    backward: set[fx.Node] = set()
    needed = {n for n in outputs if isinstance(n, fx.Node)}
    for node in reversed(list(graph.nodes)):
        if node in needed or written(node):
            needed.update(node.all_input_nodes)
            needed.add(node)
    for node in graph.nodes:
        hangs = any(i in backward or is_tangent(i) for i in node.all_input_nodes)
        tagged = node.meta.get("partitioner_tag") == "is_backward" and node not in needed
        getitem = node.target is operator.getitem and node.args[0] not in backward
        if node.op in ("call_function", "get_attr") and (hangs or tagged) and not (getitem and not hangs):
            backward.add(node)
    return backward


def _pinned(node: fx.Node) -> str:
    """Why the node may never run twice, or ""."""
    target = node.target
    if node.op == "get_attr" or isinstance(target, Kernel):
        return ""
    if not isinstance(target, torch._ops.OpOverload):
        return f"{target} is not an operator that can be run again"
    if torch.Tag.nondeterministic_seeded in target.tags and not _without_dropout(node):
        return "draws random numbers"
    if target._schema.is_mutable:
        return "changes its input in place"
    if target._schema.name.split("::")[1] in _ROUTING:
        return "integer routing decision"
    if torch.Tag.data_dependent_output in target.tags:
        return "its shape depends on the data"
    return ""


def _without_dropout(node: fx.Node) -> bool:
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
            return given == 0.0
    return False


def _layout(val: Any) -> str:
    if isinstance(val, torch.Tensor):
        return f"{tuple(val.shape)} {val.stride()} {val.dtype} {val.device.type} {val.requires_grad}"
    return repr(val)
