"""``gradstow verify``: prove that a target trains to the same numbers, and show both peaks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradstow.cli._input import InputError
from gradstow.cli._options import AsJson, Batch, Budget, Build, Rules, Text, check_budgets
from gradstow.cli._output import Meter, results
from gradstow.cli._spread import spread

EXAMPLE = "Example: gradstow verify torchvision:resnet18 --batch 4 --budget 90%"


@spread
def verify(
    *,
    target: Text,
    batch: Batch = None,
    budget: Budget = None,
    rules: Rules,
    plan: Annotated[Path | None, typer.Option(help="A plan file, instead of a budget.")] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps to compare.")] = 3,
    build: Build,
    as_json: AsJson = False,
) -> int:
    """Train plain and planned, compare every bit, measure both peaks. Fails where they differ."""
    import gradstow as gs

    with results(as_json) as emit:
        if steps < 1:
            raise InputError(f"--steps {steps} compares nothing. Give at least 1.")
        if plan is not None and budget is not None:
            raise InputError("--plan and --budget exclude each other: a plan was made for its own budget.")
        check_budgets(budget)
        loaded = None if plan is None else gs.Plan.load(plan)
        step = build.step(target, batch)
        with Meter("verifying") as meter:
            proof = gs.verify(**step, **rules.keywords(), budget=budget, plan=loaded, steps=steps, progress=meter)
        emit(str(proof), {"target": target, **proof.to_json()})
    return 0 if proof.ok else 1
