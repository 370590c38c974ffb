"""gradstow against checkpointing by hand: at each way's peak the time, and at about its time the peak.

    python benchmarks/comparison.py                       # six models, about half an hour on two cores
    python benchmarks/comparison.py --models resnet50 --rounds 5

Each way (a checkpoint around every block, around every second one, around sqrt(n) segments, selective contexts that
save matrix products and convolutions) is measured interleaved with plain eager in one process, then a plan for its
peak and a plan for its time in the same way. Step peaks in MiB; ratios are medians with a 95 % interval. How many
ops the plan reruns is beside them, which no noise touches.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import gradstow as gs
from _cases import CASES, WAYS, Case, build, checkpointed
from _rows import VERSIONS, parse, versions, write
from gradstow._stow import stow_model
from gradstow._verify import Proof, Trainee, median_interval, step_peak, time_ratios
from gradstow._wanted import Wanted
from gradstow.capture import same_randomness
from gradstow.planner import frontier, make_plan

MIB = 1 << 20
MODELS = ("gpt8", "resnet50", "densenet121", "vit_b_16", "gpt2", "gpt2-eager", "bert")
FIELDS = [
    "model", "batch", "way", "plain_peak_mib", "peak_mib", "ratio", "ratio_low", "ratio_high", "predicted_ratio",
    "rerun_ops", "rounds", *VERSIONS,
]  # fmt: skip


def main() -> None:
    parser = parse(__doc__, MODELS, "comparison.csv", rounds=5)
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS)
    arguments = parser.parse_args()
    for name in arguments.models:
        compare(name, CASES[name], arguments)


def compare(name: str, case: Case, arguments: argparse.Namespace) -> None:
    model, batch, step, whole = build(case, arguments.device)
    proof = Proof(model, batch, step.call, step.loss, None, steps=1)
    plain_peak = step_peak(proof.plain, arguments.device)
    common = {"model": name, "batch": case.batch, "plain_peak_mib": plain_peak / MIB, **versions(arguments.device)}
    points, _ = frontier(whole.graph, whole.costs, points=24, kind=gs.Plan)
    for way in arguments.ways:
        twin = proof.trainee()
        checkpointed(twin.model, case, way)
        found = measured(proof, twin, arguments)
        write(arguments.out, FIELDS, {**common, "way": way, **found})
        if "ratio" not in found:
            continue
        budget = int(found["peak_mib"] * MIB)
        plan = make_plan(whole.graph, whole.costs, step_budget=budget, budget=budget_text(whole, budget), kind=gs.Plan)
        write(
            arguments.out,
            FIELDS,
            {**common, "way": f"planned, at the peak of {way}", **planned(proof, plan, arguments)},
        )
        faster = [p for p in points if p.predicted_seconds / p.plain_seconds <= found["ratio"]]
        lowest = min(faster, key=lambda p: p.predicted_step_peak_bytes, default=None)
        if isinstance(lowest, gs.Plan):
            label = f"planned, at the time of {way}"
            write(arguments.out, FIELDS, {**common, "way": label, **planned(proof, lowest, arguments)})


def budget_text(whole: gs.Plan, step_budget: int) -> str:
    return f"{whole.resident_bytes + step_budget} B"


def planned(proof: Proof, plan: gs.Plan, arguments: argparse.Namespace) -> dict[str, Any]:
    twin = proof.trainee()
    stow_model(twin.model, Wanted(), plan)
    with same_randomness():
        twin.step()  # lowers the plan
    ratio = plan.predicted_seconds / plan.plain_seconds
    return {**measured(proof, twin, arguments), "predicted_ratio": ratio, "rerun_ops": plan.rerun_ops}


def measured(proof: Proof, twin: Trainee, arguments: argparse.Namespace) -> dict[str, Any]:
    with same_randomness():
        try:
            peak = step_peak(twin, arguments.device)
        except (RuntimeError, TypeError) as error:
            return {"predicted_ratio": f"stops with an error: {str(error).splitlines()[0][:80]}"}
        ratios = time_ratios(proof.plain, twin, arguments.rounds, lambda _n: None)
    low, high = median_interval(ratios)
    return {
        "peak_mib": peak / MIB,
        "ratio": statistics.median(ratios),
        "ratio_low": low,
        "ratio_high": high,
        "rounds": arguments.rounds,
    }


if __name__ == "__main__":
    main()
