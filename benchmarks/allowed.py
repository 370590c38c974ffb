"""Predicted time at some budgets for what the planner may use: more that is allowed must never take more.

    python benchmarks/allowed.py                          # six models, planning only: about ten minutes on two cores
    python benchmarks/allowed.py --models alexnet

One row per budget and set of actions; ``slower`` names the smaller sets whose plan is predicted to take less time, and
must stay empty. Exits with 1 where it does not. Ratios are to plain PyTorch's predicted step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

import gradstow as gs
from _cases import CASES, Case
from _rows import VERSIONS, parse, versions, write
from gradstow._api import make_step
from gradstow._planning import capture_step, plan_captured
from gradstow._units import Budget
from gradstow._wanted import Wanted
from gradstow.cli._targets import build_target

MODELS = ("alexnet", "vgg16", "resnet50", "densenet121", "gpt2", "gpt8")
PERCENTS = (80, 60, 45)
SETS: Mapping[str, Wanted] = {
    "store": Wanted(actions=("store",)),
    "store recompute": Wanted(actions=("store", "recompute")),
    "store compress": Wanted(actions=("store", "compress")),
    "store recompute compress": Wanted(),
    "store recompute compress offload": Wanted(offload="disk"),
    "store recompute compress lossy": Wanted(lossy="int8"),
    "store recompute compress offload lossy": Wanted(offload="disk", lossy="int8"),
}
FIELDS = ["model", "batch", "budget", "allowed", "predicted_ratio", "predicted_peak_mib", "slower", *VERSIONS]


def main() -> int:
    arguments = parse(__doc__, MODELS, "allowed.csv").parse_args()
    wrong = sum(run(name, CASES[name], arguments) for name in arguments.models)
    print(f"{wrong} plans are slower than one with less allowed", file=sys.stderr)
    return 1 if wrong else 0


def run(name: str, case: Case, arguments: argparse.Namespace) -> int:
    target = build_target(case.target, case.batch, attn=case.attn, seq=case.seq)
    step = make_step(target.model, target.batch, target.loss, None, None, keep_output=False)
    captured = capture_step(target.model, step, Wanted())
    wrong = 0
    for percent in PERCENTS:
        ratios: dict[str, float] = {}
        for allowed, wanted in SETS.items():
            row = {"model": name, "batch": case.batch, "budget": f"{percent}%", "allowed": allowed}
            try:
                plan = plan_captured(captured, wanted.limited(Budget(percent=percent)))
            except gs.errors.BudgetTooSmall:
                ratios[allowed] = float("inf")
            else:
                ratios[allowed] = plan.predicted_seconds / plan.plain_seconds
                row["predicted_peak_mib"] = plan.predicted_step_peak_bytes / 2**20
            smaller = [s for s in ratios if set(s.split()) < set(allowed.split())]
            slower = [s for s in smaller if ratios[s] < ratios[allowed] - 1e-9]
            wrong += bool(slower)
            row |= {"predicted_ratio": ratios[allowed], "slower": " | ".join(slower), **versions(arguments.device)}
            write(arguments.out, FIELDS, row)
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())
