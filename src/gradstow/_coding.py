"""Which results are kept as codes or elsewhere: what rules say, and what may pay where the user allows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

from gradstow._codes import CODES, EXACT, PLACES, is_place
from gradstow._wanted import Wanted
from gradstow.actions import SPARSE_OPS, Codes
from gradstow.ir import CostTable, Op, PlanData, Region, StepGraph
from gradstow.planner import Policy, ops_of_rules

_SHARES = (1.0, 0.75, 0.5, 0.25)  # of what may pay, tried from all down
_ELSEWHERE = (*EXACT, *CODES, "offload", *PLACES)


def asks_for_codes(policy: Policy) -> bool:
    """Whether a rule wants anything kept as something else."""
    return any(action == "compress" or action in _ELSEWHERE for _, action in policy.rules)


def codes_of_rules(graph: StepGraph, wanted: Wanted) -> Codes:
    """What the rules want as a code or elsewhere, by region. ``graph``: as captured."""
    rules = wanted.policy.rules
    if not any(action in _ELSEWHERE for _, action in rules):
        return {}
    known = [pattern for pattern, _ in rules]  # judged when the plan is made
    found = []
    for (r, i), (_, action) in ops_of_rules(graph, rules, known).items():
        if action in _ELSEWHERE:
            region = graph.regions[r]
            code = wanted.place(action, graph.device) if action in ("offload", *PLACES) else action
            found.append((region.fingerprint, region.ops[i].name, code))
    return _grouped(found)


def every_code(graph: StepGraph, wanted: Wanted, code: str) -> Codes:
    """All results, of which no rule says otherwise, as one code that may pay for them."""
    bound = ops_of_rules(graph, wanted.policy.rules, [pattern for pattern, _ in wanted.policy.rules])
    found = [
        (region.fingerprint, op.name, code)
        for r, region in enumerate(graph.regions)
        for i, op in enumerate(region.ops)
        if not op.backward and (r, i) not in bound and (code not in EXACT or op.target in SPARSE_OPS)
    ]
    return _grouped(found)


def together(first: Codes, second: Codes) -> Codes:
    """Both, of ops that differ."""
    return _grouped(
        [
            (p, name, code)
            for codes in (first, second)
            for p, own in codes.items()
            for code, ns in own.items()
            for name in ns
        ]
    )


def worthwhile(coded: Sequence[tuple[str, Codes, StepGraph, CostTable]], bare: StepGraph) -> Iterator[Codes]:
    """Choices of codes to plan with, from many to few.

    A code is worth it where going there and back takes less time than making the result again from what is likely to be
    kept, or where its op must not run again. Of several the fastest is taken; those that free the most bytes for a
    second come first. What travels is tried twice: with time to get there while other ops run, and waited for at once,
    which needs less.
    ``coded``: (code, the ops whose results may be kept so, the graph where all of them are, its costs).
    """
    once = {(region.fingerprint, op.name) for region in bare.regions for op in region.ops if op.pinned}
    found: dict[tuple[str, str], tuple[float, str]] = {}
    for code, codes, graph, costs in coded:
        for region in graph.regions:
            names = codes.get(region.fingerprint, {}).get(code, frozenset())
            makers, read = region.producers(), _read_later(region)
            for op, encode in ((op, encode) for op, encode in _coded(region) if op.name in names):
                key = region.fingerprint, op.name
                seconds = costs.rerun(op).seconds + sum(costs.run(o).seconds for o in encode)
                if seconds < _again(region, op, costs, makers, read) or key in once:
                    nbytes = region.storages[region.values[op.outputs[0]].storage].nbytes
                    found[key] = min((seconds / max(nbytes, 1), code), found.get(key, (float("inf"), "")))
    ranked = sorted(found, key=lambda key: (found[key][0], key))
    for count in dict.fromkeys(max(1, round(share * len(ranked))) for share in _SHARES) if ranked else ():
        chosen = _grouped([(*key, found[key][1]) for key in ranked[:count]])
        timed = chosen
        for _, _, graph, costs in coded:
            timed = with_time(timed, graph, costs)
        yield timed
        if timed != chosen:
            yield chosen


def _again(region: Region, op: Op, costs: CostTable, makers: Mapping[int, int], read: Set[int]) -> float:
    """Seconds to run an op again, with those before it whose results no backward op reads.

    ``makers``: value → op; ``read``: storages that the backward reads. Both are the region's, handed in so that they
    are found once for all of its ops.
    """
    seconds, todo, seen = 0.0, [op], {op.name}
    while todo:
        now = todo.pop()
        seconds += 0.0 if now.view else costs.run(now).seconds
        for value in now.inputs:
            if value in makers and region.values[value].storage not in read:
                maker = region.ops[makers[value]]
                if maker.name not in seen:
                    seen.add(maker.name)
                    todo.append(maker)
    return seconds


def _read_later(region: Region) -> set[int]:
    """Storages that the backward reads."""
    return {region.values[v].storage for op in region.ops if op.backward for v in op.inputs}


def _coded(region: Region) -> Iterator[tuple[Op, list[Op]]]:
    """Ops whose result is made again from a code, with the ops that make that."""
    makers = region.producers()
    for op in region.ops:
        if op.rerun is None or not op.rerun.code:
            continue
        encode, todo = [], list(op.rerun.inputs)
        while todo:
            maker = region.ops[makers[todo.pop()]]
            if maker.lazy:
                encode.append(maker)
                todo += [v for v in maker.inputs if v in makers]
        yield op, encode


def with_time(codes: Codes, graph: StepGraph, costs: CostTable) -> Codes:
    """The same, and for what travels the op after which it should be there: one after the other, beside other ops."""
    regions = {region.fingerprint: region for region in graph.regions}
    return {
        print_: {
            code: frozenset(_deadlines(regions[print_], costs, names)) if is_place(code) else names
            for code, names in own.items()
        }
        for print_, own in codes.items()
    }


def _deadlines(region: Region, costs: CostTable, names: Set[str]) -> Iterator[str]:
    """``"op>later"`` for each of the ops."""
    ways = {op.name: encode for op, encode in _coded(region)}
    plain = {text.partition(">")[0] for text in names}
    yield from (text for text in names if text.partition(">")[0] not in ways)
    clock = free = 0.0
    travelling: list[tuple[float, str]] = []
    last = ""
    for op in region.ops:
        if op.backward or op.view or op.lazy:
            continue
        clock, last = clock + costs.run(op).seconds, op.name
        while travelling and travelling[0][0] <= clock:
            yield f"{travelling.pop(0)[1]}>{last}"
        if op.name in plain and op.name in ways:
            free = max(clock, free) + max(costs.run(o).transfer for o in ways[op.name])
            travelling.append((free, op.name))
    for _, name in travelling:
        yield f"{name}>{last}" if name != last else name


def _grouped(found: Sequence[tuple[str, str, str]]) -> Codes:
    """(region, op, code) as Codes."""
    result: dict[str, dict[str, set[str]]] = {}
    for region, name, code in found:
        result.setdefault(region, {}).setdefault(code, set()).add(name)
    return {p: {code: frozenset(names) for code, names in codes.items()} for p, codes in result.items()}


def places_of(plan: PlanData) -> list[str]:
    """Where the plan's values wait, beside memory."""
    names = {name.rpartition("@")[0] for region in plan.graph.regions for name in region.actions}
    return sorted(name for name in names if is_place(name))
