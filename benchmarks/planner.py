"""How good and how fast the planner is: gaps to its proven bounds, smallest peaks, seconds, and growth with the graph.

    python benchmarks/planner.py            # about five minutes on two cores

First a row per model and budget (70, 50 and 35 % of plain, or the smallest that can be met): predicted time added,
the proven lower bound for any schedule, the gap in per cent of the step. Then chains of up to 20,000 nodes, planned
without a solver. Nothing is run but the timing of ops.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import gradstow as gs
from _cases import CASES, build
from _rows import RESULTS, VERSIONS, versions, write
from gradstow.ir import CostTable, Op, OpCost, Region, Resident, StepGraph, Storage, StorageKind, Value
from gradstow.planner import make_plan, smallest_peak

MIB = 1 << 20
MODELS = ("resnet50", "densenet121", "vit_b_16", "gpt2", "gpt2-eager", "bert", "gpt8")
FIELDS = [
    "model", "nodes", "budget", "budget_mib", "plain_peak_mib", "added_percent", "bound_percent", "gap_percent",
    "rerun_ops", "solver", "seconds_normal", "quick_added_percent", "seconds_quick", "minimum_mib",
    "proven_minimum_mib", "minimum_over_proven", *VERSIONS,
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=MODELS, choices=MODELS)
    parser.add_argument("--out", type=Path, default=RESULTS / "planner.csv")
    arguments = parser.parse_args()
    for name in arguments.models:
        run(name, arguments.out)
    for length in (500, 1000, 2500, 5000, 10000):
        grow(length, arguments.out)


def run(name: str, out: Path) -> None:
    _model, _batch, _step, whole = build(CASES[name])
    graph, costs, plain = whole.graph, whole.costs, whole.plain_step_peak_bytes
    least, proven = smallest_peak(graph, costs)
    common = {
        "model": name,
        "nodes": sum(len(region.ops) for region in graph.regions),
        "plain_peak_mib": plain / MIB,
        "minimum_mib": least / MIB,
        "proven_minimum_mib": proven / MIB,
        "minimum_over_proven": least / proven,
        **versions(),
    }
    seen: set[int] = set()
    for percent in (70, 50, 35):
        budget = max(plain * percent // 100, least)
        if budget in seen:
            continue
        seen.add(budget)
        plan, seconds = timed(graph, costs, budget, "normal")
        quick, quick_seconds = timed(graph, costs, budget, "quick")
        row = {
            "budget": f"{percent}%" if budget > least else "smallest",
            "budget_mib": budget / MIB,
            "added_percent": 100 * (plan.predicted_seconds / plan.plain_seconds - 1),
            "bound_percent": 100 * (plan.lower_bound_seconds / plan.plain_seconds - 1),
            "gap_percent": 100 * plan.gap,
            "rerun_ops": plan.rerun_ops,
            "solver": plan.solver["solver"],
            "seconds_normal": seconds,
            "quick_added_percent": 100 * (quick.predicted_seconds / quick.plain_seconds - 1),
            "seconds_quick": quick_seconds,
        }
        write(out, FIELDS, {**common, **row})


def timed(graph: StepGraph, costs: CostTable, budget: int, effort: str) -> tuple[gs.Plan, float]:
    start = time.perf_counter()
    plan = make_plan(graph, costs, step_budget=budget, budget=f"{budget} B", kind=gs.Plan, effort=effort)
    assert isinstance(plan, gs.Plan)
    return plan, time.perf_counter() - start


def grow(length: int, out: Path) -> None:
    """A chain of ``length`` forward and as many backward ops, at 40 % of what storing all takes, without a solver."""
    graph, costs = chain(length)
    whole = make_plan(graph, costs, step_budget=None, budget="")
    budget = whole.plain_step_peak_bytes * 40 // 100
    plan, seconds = timed(graph, costs, budget, "quick")
    row: dict[str, Any] = {
        "model": "chain",
        "nodes": 2 * length,
        "budget": "40%",
        "budget_mib": budget / MIB,
        "plain_peak_mib": whole.plain_step_peak_bytes / MIB,
        "quick_added_percent": 100 * (plan.predicted_seconds / plan.plain_seconds - 1),
        "rerun_ops": plan.rerun_ops,
        "solver": plan.solver["solver"],
        "seconds_quick": seconds,
    }
    write(out, FIELDS, {**row, **versions()})


def chain(length: int) -> tuple[StepGraph, CostTable]:
    """x -> f1 -> ... -> fn, and backwards; each backward op reads its forward op's input."""
    kinds = [StorageKind.RESIDENT, *[StorageKind.ACTIVATION] * length]
    kinds += [StorageKind.TANGENT, *[StorageKind.GRADIENT] * length]
    storages = [Storage(4 * MIB, kind) for kind in kinds]
    values = [Value(f"v{i}", i, (MIB,), "float32") for i in range(len(storages))]
    ops = [Op(f"f{i}", "f", (i,), (i + 1,), signature="f") for i in range(length)]
    for i in range(length):
        ops.append(Op(f"b{i}", "b", (length + 1 + i, length - 1 - i), (length + 2 + i,), backward=True, signature="b"))
    region = Region(
        "chain", tuple(storages), tuple(values), tuple(ops), (0,), (length,), (length + 1,), (True,),
        (2 * length + 1,), (True,),
    )  # fmt: skip
    costs = CostTable({"f": OpCost(0.001), "b": OpCost(0.002)}, "cpu", 1)
    return StepGraph((region,), Resident(), outputs_held=False), costs


if __name__ == "__main__":
    main()
