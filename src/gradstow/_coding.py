"""Which results are kept as lossy codes: what rules say, and what may pay where the user allows it."""

from __future__ import annotations

from collections.abc import Iterator

from gradstow._codes import CODES
from gradstow._wanted import Wanted
from gradstow.actions import Codes
from gradstow.ir import CostTable, Op, Region, StepGraph
from gradstow.planner import Policy, ops_of_rules

_SHARES = (1.0, 0.5, 0.25)  # of what may pay, tried from all down


def codes_of_rules(graph: StepGraph, policy: Policy) -> Codes:
    """What the rules want as a code, by region and code. ``graph``: as captured."""
    if not any(action in CODES for _, action in policy.rules):
        return {}
    found: dict[str, dict[str, set[str]]] = {}
    known = [pattern for pattern, _ in policy.rules]  # judged when the plan is made
    for (r, i), (_, action) in ops_of_rules(graph, policy.rules, known).items():
        if action in CODES:
            region = graph.regions[r]
            found.setdefault(region.fingerprint, {}).setdefault(action, set()).add(region.ops[i].name)
    return {p: {code: frozenset(names) for code, names in codes.items()} for p, codes in found.items()}


def every_code(graph: StepGraph, ruled: Codes, wanted: Wanted) -> Codes:
    """All results, of which no rule says otherwise, as the code that the user allows."""
    assert wanted.lossy is not None, "asked for only then"
    bound = ops_of_rules(graph, wanted.policy.rules, [pattern for pattern, _ in wanted.policy.rules])
    found = [
        (region.fingerprint, op.name, wanted.lossy)
        for r, region in enumerate(graph.regions)
        for i, op in enumerate(region.ops)
        if not op.backward and (r, i) not in bound
    ]
    return _grouped(found, ruled)


def worthwhile(graph: StepGraph, costs: CostTable, bare: StepGraph, ruled: Codes) -> list[Codes]:
    """Choices of codes to plan with, from many to few, those of rules always among them.

    A code is worth it where encoding and decoding take less time than the op itself takes to run again, or where it
    must not run again. Those that free the most bytes for a second come first. ``graph`` has every result as its code,
    ``bare`` none.
    """
    once = {(region.fingerprint, op.name) for region in bare.regions for op in region.ops if op.pinned}
    fixed = {(p, name) for p, codes in ruled.items() for names in codes.values() for name in names}
    found: dict[tuple[str, str], tuple[float, str]] = {}
    for region in graph.regions:
        for op, code, encode in _coded(region):
            key = region.fingerprint, op.name
            seconds = costs.rerun(op).seconds + costs.run(encode).seconds
            if key not in fixed and (seconds < costs.run(op).seconds or key in once):
                nbytes = region.storages[region.values[op.outputs[0]].storage].nbytes
                found[key] = seconds / max(nbytes, 1), code
    ranked = sorted(found, key=lambda key: (found[key][0], key))
    counts = dict.fromkeys(max(1, round(share * len(ranked))) for share in _SHARES) if ranked else {}
    return [_grouped([(*key, found[key][1]) for key in ranked[:count]], ruled) for count in counts]


def _coded(region: Region) -> Iterator[tuple[Op, str, Op]]:
    """Ops whose result is decoded, with the code and the op that encodes it."""
    makers = region.producers()
    for op in region.ops:
        if op.rerun is not None and op.rerun.code:
            yield op, op.rerun.code, region.ops[makers[op.rerun.inputs[0]]]


def _grouped(found: list[tuple[str, str, str]], ruled: Codes) -> Codes:
    result = {p: {code: set(names) for code, names in codes.items()} for p, codes in ruled.items()}
    for region, name, code in found:
        result.setdefault(region, {}).setdefault(code, set()).add(name)
    return {p: {code: frozenset(names) for code, names in codes.items()} for p, codes in result.items()}
