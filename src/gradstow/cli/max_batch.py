"""``gradstow max-batch``: the largest batch of a target that a budget allows, by planning alone."""

from __future__ import annotations

from typing import Annotated

import typer

from gradstow.cli._input import InputError
from gradstow.cli._options import AsJson, Build, Rules, Text, check_budgets
from gradstow.cli._output import Meter, results
from gradstow.cli._spread import spread
from gradstow.cli._train_options import Precision, check_precision

EXAMPLE = "Example: gradstow max-batch torchvision:resnet18 --budget 4GiB"


@spread
def max_batch(
    *,
    target: Text,
    budget: Annotated[str, typer.Option("--budget", help='"6GiB" or "auto".')],
    limit: Annotated[int, typer.Option("--limit", help="The largest batch to try.")] = 65536,
    precision: Precision = "fp32",
    rules: Rules,
    effort: Annotated[str, typer.Option(help="quick (no solver), normal or thorough.")] = "normal",
    build: Build,
    as_json: AsJson = False,
) -> None:
    """Find the largest batch that trains within a budget, without running out of memory on the way."""
    import torch

    import gradstow as gs
    from gradstow.train._max_batch import max_batch as find

    with results(as_json) as emit:
        check_budgets(budget)
        check_precision(precision)
        if limit < 1:
            raise InputError(f"--limit {limit} leaves no batch to try. Give at least 1.")
        step = build.step(target, None if ".py:" in target else 2)
        with Meter("planning") as meter:
            found = find(
                make_batch=step.pop("batch"),
                **step,
                **rules.keywords(),
                budget=budget,
                limit=limit,
                precision=precision,
                effort=effort,
                progress=meter,
            )
        made_with = {"torch": str(torch.__version__), "gradstow": gs.__version__}
        emit(f"{target}\n{found}", {"target": target, **made_with, **found.to_json()})
