"""What exact compression adds to storing and recomputing: at one time the peak, at one peak the time.

    python benchmarks/actions.py                          # five models, about an hour on two cores
    python benchmarks/actions.py --models alexnet --rounds 9

For some budgets: the plan that only stores and recomputes, the plan with compression that needs least within its time
(as predicted), and the fastest plan with compression for its peak. Each is measured interleaved with plain PyTorch in
one process. Step peaks in MiB; ratios to plain PyTorch are medians with a 95 % interval. Losses and gradients of one
step are compared bit for bit.
"""

from __future__ import annotations

import argparse

import gradstow as gs
from _cases import CASES, Case
from _measured import begun, measured
from _rows import VERSIONS, parse, versions, write
from gradstow._planning import plan_captured, plan_frontier
from gradstow._units import Budget
from gradstow._wanted import Wanted
from gradstow.capture import Captured

MODELS = ("alexnet", "vgg16", "resnet50", "densenet121", "gpt2")
PERCENTS = (80, 60, 45)
BARE = ("store", "recompute")
FIELDS = [
    "model", "batch", "budget", "way", "plain_peak_mib", "predicted_peak_mib", "peak_mib", "predicted_ratio", "ratio",
    "ratio_low", "ratio_high", "rerun_ops", "compressed", "equal", "rounds", *VERSIONS,
]  # fmt: skip


def main() -> None:
    arguments = parse(__doc__, MODELS, "actions.csv", rounds=7).parse_args()
    for name in arguments.models:
        run(name, CASES[name], arguments)


def run(name: str, case: Case, arguments: argparse.Namespace) -> None:
    captured, proof, plain_peak = begun(case, arguments.device)
    points, _ = plan_frontier(captured, Wanted(), 24)
    common = {"model": name, "batch": case.batch, **versions(arguments.device)}
    common["plain_peak_mib"] = plain_peak
    for percent in PERCENTS:
        budget = Budget(percent=percent)
        try:
            base = plan_captured(captured, Wanted(budget, actions=BARE))
        except gs.errors.BudgetTooSmall as error:
            budget = Budget(total_bytes=error.minimum_bytes)
            base = plan_captured(captured, Wanted(budget, actions=BARE))
        ways = {"store and recompute": base, **compressed(captured, base, points)}
        for way, plan in ways.items():
            row = {
                **common,
                "budget": f"{percent}%",
                "way": way,
                **measured(proof, plan, arguments.rounds, arguments.device),
            }
            write(arguments.out, FIELDS, row)


def compressed(captured: Captured, base: gs.Plan, points: list[gs.Plan]) -> dict[str, gs.Plan]:
    """The plans with compression at about the time, and at the peak, of one without."""
    peak = base.resident_bytes + base.predicted_step_peak_bytes
    found = {"compress, at its peak": plan_captured(captured, Wanted(Budget(total_bytes=peak)))}
    fast = [p for p in points if p.predicted_seconds <= base.predicted_seconds]
    if fast:
        found["compress, at its time"] = min(fast, key=lambda p: p.predicted_step_peak_bytes)
    return found


if __name__ == "__main__":
    main()
