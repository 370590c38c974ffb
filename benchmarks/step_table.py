"""The table of step peaks and times: planned against plain and against a checkpoint per block.

    python benchmarks/step_table.py                      # all models, about an hour on two cores
    python benchmarks/step_table.py --models alexnet vit_b_16 --rounds 5
    python benchmarks/step_table.py --device cuda

Each planned row is proven equal over three optimizer steps (losses, gradients, buffers, parameters, RNG state),
its peak is measured twice, by ``gs.measure_peak`` and by summing the profiler's memory events here, and its time
is the median of interleaved ratios to plain eager with a 95 % interval. Peaks are step peaks: above what is
resident, gradients included. Rows are appended to a CSV as they are found.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import gradstow as gs
from _cases import CASES, Case, build, checkpointed
from _rows import RESULTS, VERSIONS, versions, write
from gradstow._units import Budget
from gradstow._verify import Proof, median_interval, step_peak, time_ratios
from gradstow.capture import same_randomness
from gradstow.planner import make_plan

MIB = 1 << 20
FIELDS = [
    "model", "batch", "setting", "budget_mib", "plain_peak_mib", "measured_peak_mib", "events_peak_mib",
    "predicted_peak_mib", "prediction_error_percent", "within_budget", "equal", "compared", "time_ratio",
    "ratio_low", "ratio_high", "bar_ratio", "rerun_ops", "predicted_added_percent", "rounds", *VERSIONS,
]  # fmt: skip


PERCENTS = (100, 80, 60, 45)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=[name for name in CASES if name != "bert"], choices=list(CASES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="*", help="settings to run, such as 466MiB or 60%%; default all")
    parser.add_argument("--out", type=Path, default=RESULTS / "step_table.csv")
    arguments = parser.parse_args()
    for name in arguments.models:
        run_case(name, CASES[name], arguments)


def run_case(name: str, case: Case, arguments: argparse.Namespace) -> None:
    model, batch, step, whole = build(case, arguments.device)
    proof = Proof(model, batch, step.call, step.loss, None)
    common = {"model": name, "batch": case.batch, **versions(arguments.device)}
    settings = [(f"{p}%", Budget(percent=p), 1.03 if p == 100 else None) for p in PERCENTS]
    settings += [(f"{m}MiB", Budget(total_bytes=whole.resident_bytes + m * MIB), bar) for m, bar in case.points]
    for label, budget, bar in settings:
        if arguments.only and label not in arguments.only:
            continue
        row = {**common, "setting": label, "bar_ratio": bar}
        try:
            plan = replan(whole, budget)
        except gs.errors.BudgetTooSmall as error:
            row["setting"] += f" refused: the smallest is {(error.minimum_bytes - whole.resident_bytes) / MIB:.0f} MiB"
            write(arguments.out, FIELDS, row)
            continue
        write(arguments.out, FIELDS, {**row, **planned_row(proof, plan, arguments.rounds)})
    if not arguments.only or "block" in arguments.only:
        write(arguments.out, FIELDS, {**common, "setting": "checkpoint per block", **block_row(proof, case, arguments)})


def replan(whole: gs.Plan, budget: Budget) -> gs.Plan:
    """Another budget for a step that is captured and priced already."""
    if budget.percent is not None:
        step_budget = int(budget.percent / 100 * whole.plain_step_peak_bytes)
    else:
        assert budget.total_bytes is not None
        step_budget = budget.total_bytes - whole.resident_bytes
    plan = make_plan(whole.graph, whole.costs, step_budget=step_budget, budget=str(budget), kind=gs.Plan)
    assert isinstance(plan, gs.Plan)
    return plan


def planned_row(proof: Proof, plan: gs.Plan, rounds: int) -> dict[str, Any]:
    peaks: list[int] = []
    on_cpu = plan.graph.device == "cpu"
    found = proof.check(plan, rounds, inspect=lambda twin: peaks.append(events_peak(twin)) if on_cpu else None)
    events = peaks[0] if peaks else None
    predicted, measured = found.predicted_peak_bytes, found.measured_peak_bytes
    return {
        "budget_mib": None if found.budget_bytes is None else found.budget_bytes / MIB,
        "plain_peak_mib": found.plain_peak_bytes / MIB,
        "measured_peak_mib": measured / MIB,
        "events_peak_mib": None if events is None else events / MIB,
        "predicted_peak_mib": predicted / MIB,
        "prediction_error_percent": 100 * (predicted / measured - 1),
        "within_budget": found.within_budget and (events is None or events <= (found.budget_bytes or events)),
        "equal": found.equal and not found.inconclusive,
        "compared": found.compared,
        "time_ratio": found.time_ratio,
        "ratio_low": found.time_ratio_interval[0],
        "ratio_high": found.time_ratio_interval[1],
        "rerun_ops": found.rerun_ops,
        "predicted_added_percent": 100 * (plan.predicted_seconds / plan.plain_seconds - 1),
        "rounds": rounds,
    }


def block_row(proof: Proof, case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """torch.utils.checkpoint around every block, measured beside plain in the same process."""
    twin = proof.trainee()
    checkpointed(twin.model, case, "every block")
    with same_randomness():
        try:
            peak = step_peak(twin, arguments.device)
        except RuntimeError as error:
            return {"equal": f"stops with an error: {str(error).splitlines()[0][:80]}"}
        ratios = time_ratios(proof.plain, twin, arguments.rounds, lambda _n: None)
    low, high = median_interval(ratios)
    middle = sorted(ratios)[len(ratios) // 2]
    return {
        "measured_peak_mib": peak / MIB,
        "plain_peak_mib": proof.plain_peak_bytes / MIB,
        "time_ratio": middle,
        "ratio_low": low,
        "ratio_high": high,
        "rounds": arguments.rounds,
    }


def events_peak(trainee: Any) -> int:
    """The step peak by the profiler's memory events, summed here: independent of gs.measure_peak."""
    trainee.optimizer.zero_grad(set_to_none=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        trainee.step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


if __name__ == "__main__":
    main()
