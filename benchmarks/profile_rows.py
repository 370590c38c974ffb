"""Do the rows of a profile add up to the measured peak? Of plain PyTorch's step, and of the planned one.

    python benchmarks/profile_rows.py                     # six models, about ten minutes on two cores
    python benchmarks/profile_rows.py --models vit_b_16 --percent 80

The peaks are of all of training: what is resident, AdamW's state and step among it. ``saved`` is what autograd really
saves, summed over modules, against what is predicted. Not timed.
"""

from __future__ import annotations

import argparse
import time

import torch

import gradstow as gs
from _cases import CASES, Case, build
from _rows import VERSIONS, parse, versions, write
from gradstow._errors import BudgetTooSmall
from gradstow.report import saved_by_module

MIB = 1 << 20
MODELS = ("resnet50", "densenet121", "vit_b_16", "gpt2", "alexnet", "vgg16")
FIELDS = [
    "model", "batch", "step", "rows", "rows_mib", "measured_mib", "rows_to_measured", "saved_mib",
    "measured_saved_mib", "modules_alike", "seconds", *VERSIONS,
]  # fmt: skip


def main() -> None:
    arguments = parse(__doc__, MODELS, "profile_rows.csv", percent=85).parse_args()
    for name in arguments.models:
        run(name, CASES[name], arguments)


def run(name: str, case: Case, arguments: argparse.Namespace) -> None:
    model, batch, step, _ = build(case, arguments.device)
    start = time.perf_counter()
    asked = {"loss": step.loss, "forward": step.call, "optimizer": torch.optim.AdamW(model.parameters())}
    try:
        budget = f"{arguments.percent}%"
        found = gs.profile(model, batch, budget=budget, effort="quick", measure=True, **asked)
    except BudgetTooSmall as error:
        budget = "minimum"
        found = gs.profile(model, batch, budget=error.minimum_bytes, effort="quick", measure=True, **asked)
    seconds = time.perf_counter() - start
    predicted, saved = saved_by_module(found.plan), dict(found.measured["plain"].saved or {})
    for which, snapshot in (("plain", found.plain), ("planned", found.planned)):
        rows, measured = sum(row.nbytes for row in snapshot.rows), found.measured[which].peak_bytes
        row = {
            "model": name,
            "batch": case.batch,
            "step": which if which == "plain" else budget,
            "rows": len(snapshot.rows),
            "rows_mib": rows / MIB,
            "measured_mib": measured / MIB,
            "rows_to_measured": f"{rows / measured:.6f}",
            "seconds": seconds,
            **versions(),
        }
        if which == "plain":
            names = {*predicted, *saved}
            row["saved_mib"] = sum(predicted.values()) / MIB
            row["measured_saved_mib"] = sum(saved.values()) / MIB
            row["modules_alike"] = f"{sum(predicted.get(n) == saved.get(n) for n in names)} of {len(names)}"
        write(arguments.out, FIELDS, row)


if __name__ == "__main__":
    main()
