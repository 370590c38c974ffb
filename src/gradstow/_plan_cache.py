"""Plans on disk, so that a step that was planned before is not planned again by the next process.

A plan is found by all that decides it but the costs of ops, which lie beside it: it serves where each of them is still
the same. The folder is ``$GRADSTOW_CACHE_DIR/plans`` or ``~/.cache/gradstow/plans``; one that cannot be read or written
changes nothing but the time. ``GRADSTOW_PLAN_CACHE=0`` neither reads nor writes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from gradstow._errors import StalePlan
from gradstow._plan import Plan
from gradstow._wanted import Wanted
from gradstow.cost import cache_folder, cost_key, write_whole
from gradstow.ir import CostTable, OpCost, StepGraph
from gradstow.planner import Effort

_FORMAT = 1
_MOST_PLANS = 200
_MOST_BYTES = 200 << 20
_SUFFIXES = (".plan", ".tmp")  # the second of what a process left that was killed while it wrote


def plan_key(graph: StepGraph, facts: str, wanted: Wanted) -> str:
    """Name of the plan: of the step as captured, what is wanted, where, and by which versions.

    "" where a plan is to be made anew: an effort was asked for, or the budget is what happens to be free now.
    """
    effort = replace(wanted.effort, interruptible=False)  # what is interrupted is not kept
    free = wanted.budget is not None and wanted.budget.auto and wanted.profile is None
    off = os.environ.get("GRADSTOW_PLAN_CACHE") == "0"
    if off or free or effort != Effort() or not wanted.cached:
        return ""
    asked = repr(replace(wanted, effort=effort, progress=None))
    versions = [_FORMAT, _own_files(), version("scipy")]
    return _digest(json.dumps([versions, cost_key(graph.device), asked, facts, graph.to_json()], sort_keys=True))


def kept_plan(key: str, prices: Callable[[Sequence[str]], Mapping[str, OpCost]]) -> Plan | None:
    """The plan of that name where there is one, undamaged, and ``prices`` still names the costs that decided it."""
    body = _read(key) if key else ""
    if not body:
        return None
    costs, _, text = body.partition("\n")
    try:
        decisive = CostTable.from_json(json.loads(costs)).costs
        plan = Plan.loads(text)
    except (StalePlan, ValueError, KeyError, TypeError):
        return None
    return plan if prices(list(decisive)) == decisive else None


def keep_plan(key: str, plan: Plan, costs: Mapping[str, OpCost]) -> None:
    """Write a plan for other processes, with all ``costs`` that decided it; the rename is atomic."""
    if not key:
        return
    body = json.dumps(CostTable(costs).to_json()) + "\n" + plan.dumps()
    if len(body) > _MOST_BYTES:
        return
    with contextlib.suppress(OSError, RuntimeError):
        folder = cache_folder("plans")
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / f"{key}.plan", _seal(key, body) + "\n" + body)
        _trim(folder)


def _read(key: str) -> str:
    """What lies under that name, and is marked as used now; "" where nothing does, or it was not written for it."""
    try:
        path = cache_folder("plans") / f"{key}.plan"
        seal, _, body = path.read_text(encoding="utf-8").partition("\n")
        if seal != _seal(key, body):
            return ""
        with contextlib.suppress(OSError):  # of a folder that can only be read
            os.utime(path)
        return body
    except (OSError, ValueError, RuntimeError):
        return ""


def _trim(folder: Path) -> None:
    """Least recently used files leave."""
    files = [(path.stat(), path) for path in folder.iterdir() if path.suffix in _SUFFIXES]
    total = 0
    for number, (stat, path) in enumerate(sorted(files, key=lambda file: file[0].st_mtime_ns, reverse=True), 1):
        total += stat.st_size
        if number > _MOST_PLANS or total > _MOST_BYTES:
            path.unlink(missing_ok=True)


@functools.cache
def _own_files() -> str:
    """Of the code that plans, which may change without a new version."""
    folder = Path(__file__).parent
    return _digest("".join(f"{p.relative_to(folder)}\n{p.read_text('utf-8')}" for p in sorted(folder.rglob("*.py"))))


def _seal(key: str, body: str) -> str:
    return _digest(f"{key}\n{body}")


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()
