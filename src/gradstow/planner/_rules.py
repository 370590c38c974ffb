"""Rules for families of ops, aten names and module paths: which ops they hold for, and what that binds."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Mapping, Sequence

from gradstow._codes import CODES, EXACT, PLACES
from gradstow._errors import PolicyError
from gradstow.ir import Op, Region, StepGraph
from gradstow.planner._problem import Problem

Rules = tuple[tuple[str, str], ...]  # (pattern, action)
ACTIONS = ("store", "recompute", "compress", *EXACT, *CODES, "offload", *PLACES)
HOW = (
    'Write a name ("auto", "store-all", "recompute-all", "sqrt", "selective"), or rules such as '
    f'{{"relu": "recompute", "layer3.*": "store"}}. Actions are {", ".join(ACTIONS)}.'
)

_FAMILIES: Mapping[str, frozenset[str]] = {
    "attention": frozenset(),  # by prefix
    "avgpool": frozenset({"avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"}),
    "batchnorm": frozenset(
        {
            "_native_batch_norm_legit",
            "_native_batch_norm_legit_functional",
            "_native_batch_norm_legit_no_training",
            "_batch_norm_with_update_functional",
            "native_batch_norm",
            "cudnn_batch_norm",
        }
    ),
    "conv": frozenset({"convolution"}),
    "conv1d": frozenset({"convolution"}),
    "conv2d": frozenset({"convolution"}),
    "conv3d": frozenset({"convolution"}),
    "dropout": frozenset({"keep_mask", "masked_scale", "native_dropout", "bernoulli"}),
    "embedding": frozenset({"embedding"}),
    "groupnorm": frozenset({"native_group_norm"}),
    "layernorm": frozenset({"native_layer_norm"}),
    "linear": frozenset({"addmm", "mm"}),
    "matmul": frozenset({"addmm", "mm", "bmm", "baddbmm"}),
    "maxpool": frozenset({"max_pool2d_with_indices", "max_pool3d_with_indices"}),
    "relu": frozenset({"relu"}),
    "rmsnorm": frozenset({"_fused_rms_norm"}),
    "softmax": frozenset({"_softmax", "_log_softmax"}),
}
_DIMENSIONS = {"conv1d": 3, "conv2d": 4, "conv3d": 5}


Bound = dict[tuple[int, int], tuple[str, str]]  # (region, op) → the rule that holds for it


def ops_of_rules(graph: StepGraph, rules: Rules, known_ops: Collection[str] = ()) -> Bound:
    """For each forward op the last rule that fits it.

    Raises:
        PolicyError: a pattern is neither a family, nor one of ``known_ops``, nor a module's path.
    """
    ops = {
        (r, i): (region, op)
        for r, region in enumerate(graph.regions)
        for i, op in enumerate(region.ops)
        if region.managed and not (op.backward or op.view or op.lazy)
    }
    for pattern, _ in rules:
        _check_pattern(graph.model, [op for _, op in ops.values()], pattern, known_ops)
    bound: Bound = {}
    for pattern, action in rules:
        bound.update((key, (pattern, action)) for key, (region, op) in ops.items() if _matches(region, op, pattern))
    return bound


def apply_rules(problem: Problem, rules: Rules, known_ops: Collection[str]) -> list[str]:
    """Turn rules into constraints of the problem; says for each what it came to.

    What is to be kept as a code is encoded in the graph already, or cannot be.
    """
    bound = ops_of_rules(problem.graph, rules, known_ops)
    codes = _exact_codes(problem)
    matched = dict.fromkeys((pattern for pattern, _ in rules), 0)
    failed = dict.fromkeys(matched, 0)
    for node in problem.forward:
        pattern, action = bound.get((node.region, node.op), ("", ""))
        for s in node.outputs if pattern else ():
            matched[pattern] += 1
            failed[pattern] += not _bind(problem, s, action, codes)
    return [_note(pattern, action, matched[pattern], failed[pattern]) for pattern, action in rules]


def _bind(problem: Problem, s: int, action: str, codes: Mapping[int, int]) -> bool:
    """Do what a rule says about one storage; whether that can be done."""
    if action == "store":
        if s in problem.never:
            return False
        problem.remaker.pop(s, None)
        return True
    if action == "recompute":
        if s in problem.remaker:
            problem.never.add(s)
        return s in problem.remaker
    if s in codes:  # of indices and masks also where a rule names a code for floats
        problem.never.add(s)
        problem.remaker.pop(codes[s], None)
    return s in problem.never


def _exact_codes(problem: Problem) -> dict[int, int]:
    """Storage → what an action makes of it, of which the backward gets along without it."""
    found: dict[int, int] = {}
    decoded: set[int] = set()
    for index in problem.lazy:
        node = problem.forward[index]
        if node.pinned or node.inputs[0] in found.values():
            decoded.update(node.outputs)
        elif node.inputs[0] in problem.keepable:
            found[node.inputs[0]] = node.outputs[0]
    read = {s for node in problem.backward for s in node.inputs}
    return {s: code for s, code in found.items() if s not in read}


def _note(pattern: str, action: str, matched: int, failed: int) -> str:
    if not matched:
        return f"{pattern}={action} matches nothing, or later rules win everywhere"
    instead = {
        "store": "are only ever kept as a code or elsewhere",
        "recompute": "cannot be made again and are stored",
    }.get(action, "have no such code and are planned as without the rule")
    why = f", {failed} of them {instead}" if failed else ""
    return f"{pattern}={action} holds for {matched} values{why}"


def _check_pattern(model: str, ops: Sequence[Op], pattern: str, known_ops: Collection[str]) -> None:
    here = {_packet(op) for op in ops}
    if pattern in _FAMILIES or pattern in here or pattern in known_ops:
        return
    modules = {op.module for op in ops}
    if any(_in_module(module, pattern) for module in modules):
        return
    if any(c in pattern for c in "*?["):
        return  # a glob that matches nothing is reported
    paths = {part for m in modules for part in (m, m.partition(".")[0]) if part}
    raise PolicyError(
        f"{pattern!r} is no family of ops, no aten op and no module of {model or 'the model'}."
        f"{close(pattern, [*_FAMILIES, *here, *paths])} {HOW}"
    )


def _matches(region: Region, op: Op, pattern: str) -> bool:
    if pattern == _packet(op):
        return True
    if pattern in _FAMILIES:
        return in_family(region, op, pattern)
    return _in_module(op.module, pattern)


def in_family(region: Region, op: Op, family: str) -> bool:
    packet = _packet(op)
    if family == "attention":
        return packet.startswith("_scaled_dot_product")
    if packet not in _FAMILIES[family]:
        return False
    shape = region.values[op.outputs[0]].shape
    return len(shape) == _DIMENSIONS.get(family, len(shape))


def is_broken(pattern: str) -> bool:
    """Whether a glob has a bracket that is not closed, which ``fnmatch`` takes for a letter."""
    at = pattern.find("[")
    while at >= 0:
        first = at + 2 if pattern[at + 1 : at + 2] == "!" else at + 1
        end = pattern.find("]", first + 1)  # a ] that comes first is a letter
        if end < 0:
            return True
        at = pattern.find("[", end)
    return False


def _in_module(module: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(module, pattern) or module.startswith(f"{pattern}.")


def _packet(op: Op) -> str:
    """``aten.relu.default`` → ``relu``."""
    parts = op.target.split(".")
    return parts[1] if len(parts) >= 3 else op.target


def close(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(str(name), sorted(set(known)), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(near)}?" if near else ""
