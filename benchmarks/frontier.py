"""Does the measured peak fall with the budget? Twenty points of each model's frontier, run and measured.

    python benchmarks/frontier.py                         # six models, about half an hour on two cores
    python benchmarks/frontier.py --models vit_b_16 --points 8

For each point: the budget for the step, the predicted and the measured step peak, the predicted time added and its
proven lower bound, and whether the losses and gradients of one step equal plain PyTorch's. Not timed.
"""

from __future__ import annotations

import argparse
import time

import gradstow as gs
from _cases import CASES, Case, build
from _rows import VERSIONS, parse, versions, write
from gradstow._stow import stow_model
from gradstow._verify import Proof, compare, step_peak
from gradstow._wanted import Wanted
from gradstow.capture import same_randomness
from gradstow.planner import frontier

MIB = 1 << 20
MODELS = ("gpt8", "resnet50", "densenet121", "vit_b_16", "gpt2", "gpt2-eager", "bert")
FIELDS = [
    "model", "batch", "point", "plain_peak_mib", "budget_mib", "predicted_peak_mib", "measured_peak_mib",
    "within_budget", "equal", "added_percent", "bound_percent", "gap_percent", "rerun_ops", "proven_minimum_mib",
    "planning_seconds", *VERSIONS,
]  # fmt: skip


def main() -> None:
    arguments = parse(__doc__, MODELS, "frontier.csv", points=20).parse_args()
    for name in arguments.models:
        run(name, CASES[name], arguments)


def run(name: str, case: Case, arguments: argparse.Namespace) -> None:
    model, batch, step, whole = build(case, arguments.device)
    start = time.perf_counter()
    plans, proven = frontier(whole.graph, whole.costs, points=arguments.points, kind=gs.Plan)
    planning = time.perf_counter() - start
    proof = Proof(model, batch, step.call, step.loss, None, steps=1)
    for number, plan in enumerate(plans):
        assert isinstance(plan, gs.Plan)
        twin = proof.trainee()
        stow_model(twin.model, Wanted(), plan)
        with same_randomness():
            got = twin.train(1, lambda _n: None)
            peak = step_peak(twin, arguments.device)
        budget = int(plan.budget.removesuffix(" B")) - plan.resident_bytes
        row = {
            "model": name,
            "batch": case.batch,
            "point": number,
            "plain_peak_mib": plan.plain_step_peak_bytes / MIB,
            "budget_mib": budget / MIB,
            "predicted_peak_mib": plan.predicted_step_peak_bytes / MIB,
            "measured_peak_mib": peak / MIB,
            "within_budget": peak <= budget,
            "equal": not compare(proof.expected, got),
            "added_percent": 100 * (plan.predicted_seconds / plan.plain_seconds - 1),
            "bound_percent": 100 * (plan.lower_bound_seconds / plan.plain_seconds - 1),
            "gap_percent": 100 * plan.gap,
            "rerun_ops": plan.rerun_ops,
            "proven_minimum_mib": proven / MIB,
            "planning_seconds": planning,
            **versions(arguments.device),
        }
        write(arguments.out, FIELDS, row)


if __name__ == "__main__":
    main()
