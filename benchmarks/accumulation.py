"""Accumulation: the step peak and time of a micro-batch whose gradients are added to existing ones.

    python benchmarks/accumulation.py                     # six models, about a quarter of an hour on two cores
    python benchmarks/accumulation.py --models alexnet --rounds 5

The second of two micro-batches is measured, planned against plain PyTorch, through ``gs.stow(model, budget)`` as a
training loop uses it. At 100 % the peak may be at most 1 % above plain PyTorch's. Losses, gradients, buffers,
parameters and random states are compared bit for bit over three optimizer steps of two micro-batches. Peaks are
step peaks: above what is resident, the existing gradients included.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import gradstow as gs
from _cases import CASES, Case
from _rows import VERSIONS, parse, versions, write
from gradstow._api import make_step
from gradstow._stow import plan_of
from gradstow._verify import Proof, compare, median_interval, step_peak, time_ratios
from gradstow.capture import same_randomness
from gradstow.cli._targets import build_target

MIB = 1 << 20
MODELS = ("alexnet", "resnet50", "vit_b_16", "gpt2", "gpt8", "densenet121")
BATCHES = {"alexnet": 8}  # where the gradients are large beside the activations
PERCENTS = (100, 60)
FIELDS = [
    "model", "batch", "setting", "plain_peak_mib", "measured_peak_mib", "over_plain_percent", "predicted_peak_mib",
    "equal", "compared", "time_ratio", "ratio_low", "ratio_high", "deliveries", "rounds", *VERSIONS,
]  # fmt: skip


def main() -> None:
    arguments = parse(__doc__, MODELS, "accumulation.csv", rounds=7).parse_args()
    for name in arguments.models:
        run_case(name, CASES[name], arguments)


def run_case(name: str, case: Case, arguments: argparse.Namespace) -> None:
    batch_size = BATCHES.get(name, case.batch)
    target = build_target(case.target, batch_size, attn=case.attn, seq=case.seq)
    step = make_step(target.model, target.batch, target.loss, None, None, keep_output=False)
    proof = Proof(target.model, target.batch, step.call, step.loss, None, micro_batches=2)
    plain_peak = step_peak(proof.plain, arguments.device)
    common = {"model": name, "batch": batch_size, "plain_peak_mib": plain_peak / MIB, **versions(arguments.device)}
    for percent in PERCENTS:
        found = planned(proof, plain_peak, f"{percent}%", arguments)
        write(arguments.out, FIELDS, {**common, **found})


def planned(proof: Proof, plain_peak: int, budget: str | int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Within the budget, or the smallest that serves every micro-batch."""
    twin = proof.trainee()
    gs.stow(twin.model, budget)
    try:
        with same_randomness():
            got = twin.train(proof.steps, lambda _n: None)
            peak = step_peak(twin, arguments.device)
            ratios = time_ratios(proof.plain, twin, arguments.rounds, lambda _n: None)
    except gs.errors.BudgetTooSmall as error:
        return planned(proof, plain_peak, error.minimum_bytes, arguments)
    plan = plan_of(twin.model)
    assert plan is not None
    low, high = median_interval(ratios)
    return {
        "setting": budget if isinstance(budget, str) else "smallest",
        "measured_peak_mib": peak / MIB,
        "over_plain_percent": 100 * (peak / plain_peak - 1),
        "predicted_peak_mib": plan.predicted_step_peak_bytes / MIB,
        "equal": not compare(proof.expected, got),
        "compared": len(got),
        "time_ratio": statistics.median(ratios),
        "ratio_low": low,
        "ratio_high": high,
        "deliveries": sum(type(e).__name__ == "Deliver" for r in plan.schedule.regions for e in r.backward),
        "rounds": arguments.rounds,
    }


if __name__ == "__main__":
    main()
