"""Rules for families of ops, aten names and module paths, as constraints of a problem."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Mapping

from gradstow._errors import PolicyError
from gradstow.planner._problem import Node, Problem

Rules = tuple[tuple[str, str], ...]  # (pattern, action)
ACTIONS = ("store", "recompute")
HOW = (
    'Write a name ("auto", "store-all", "recompute-all", "sqrt", "selective"), or rules such as '
    '{"relu": "recompute", "layer3.*": "store"}.'
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


def apply_rules(problem: Problem, rules: Rules, known_ops: Collection[str]) -> list[str]:
    """Turn rules into constraints of the problem; says for each what it came to.

    Raises:
        PolicyError: a pattern is neither a family, nor one of ``known_ops``, nor a module's path.
    """
    for pattern, _ in rules:
        _check_pattern(problem, pattern, known_ops)
    matched = {pattern: 0 for pattern, _ in rules}
    bound: dict[int, tuple[str, str]] = {}
    for node in problem.forward:
        if node.lazy or not problem.graph.regions[node.region].managed:
            continue
        for pattern, action in rules:
            if _matches(problem, node, pattern):
                bound.update((s, (pattern, action)) for s in node.outputs)
    failed = dict.fromkeys(matched, 0)
    for s, (pattern, action) in bound.items():
        matched[pattern] += 1
        if action == "store":
            problem.remaker.pop(s, None)
        elif s in problem.remaker:
            problem.never.add(s)
        else:
            failed[pattern] += 1
    return [_note(pattern, action, matched[pattern], failed[pattern]) for pattern, action in rules]


def _note(pattern: str, action: str, matched: int, failed: int) -> str:
    if not matched:
        return f"{pattern}={action} matches nothing, or later rules win everywhere"
    why = f", {failed} of them cannot be made again and are stored" if failed else ""
    return f"{pattern}={action} holds for {matched} values{why}"


def _check_pattern(problem: Problem, pattern: str, known_ops: Collection[str]) -> None:
    here = {_packet(problem, node) for node in problem.forward}
    if pattern in _FAMILIES or pattern in here or pattern in known_ops:
        return
    modules = {_module(problem, node) for node in problem.forward}
    if any(_in_module(module, pattern) for module in modules):
        return
    if any(c in pattern for c in "*?["):
        return  # a glob that matches nothing is reported
    paths = {part for m in modules for part in (m, m.partition(".")[0]) if part}
    raise PolicyError(
        f"{pattern!r} is no family of ops, no aten op and no module of {problem.graph.model or 'the model'}."
        f"{close(pattern, [*_FAMILIES, *here, *paths])} {HOW}"
    )


def _matches(problem: Problem, node: Node, pattern: str) -> bool:
    packet = _packet(problem, node)
    if pattern == packet:
        return True
    if pattern in _FAMILIES:
        return in_family(problem, node, pattern)
    return _in_module(_module(problem, node), pattern)


def in_family(problem: Problem, node: Node, family: str) -> bool:
    packet = _packet(problem, node)
    if family == "attention":
        return packet.startswith("_scaled_dot_product")
    if packet not in _FAMILIES[family]:
        return False
    region = problem.graph.regions[node.region]
    shape = region.values[region.ops[node.op].outputs[0]].shape
    return len(shape) == _DIMENSIONS.get(family, len(shape))


def _in_module(module: str, pattern: str) -> bool:
    return bool(module) and (fnmatch.fnmatchcase(module, pattern) or module.startswith(f"{pattern}."))


def _packet(problem: Problem, node: Node) -> str:
    """``aten.relu.default`` → ``relu``."""
    target = problem.graph.regions[node.region].ops[node.op].target
    parts = target.split(".")
    return parts[1] if len(parts) >= 3 else target


def _module(problem: Problem, node: Node) -> str:
    return problem.graph.regions[node.region].ops[node.op].module


def close(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(str(name), sorted(set(known)), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(near)}?" if near else ""
