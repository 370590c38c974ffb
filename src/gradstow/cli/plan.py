"""``gradstow plan``: plan a target's training step under a budget and show the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradstow.cli._input import check_writable
from gradstow.cli._options import AsJson, Batch, Budget, Build, Rules, Text, check_budgets
from gradstow.cli._output import Meter, results
from gradstow.cli._spread import spread

EXAMPLE = "Example: gradstow plan torchvision:resnet50 --batch 8 --budget 60% --out plan.json"


@spread
def plan(
    *,
    target: Text,
    batch: Batch = None,
    budget: Budget = None,
    rules: Rules,
    effort: Annotated[str, typer.Option(help="quick (no solver), normal or thorough.")] = "normal",
    codegen: Annotated[str, typer.Option(help="eager, or inductor: compiled kernels.")] = "eager",
    device: Annotated[str | None, typer.Option(help="Plan for a device elsewhere: cuda:h100, cuda:t4, ...")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan to this file.")] = None,
    build: Build,
    everything: Annotated[bool, typer.Option("--all", help="Show every value in the table.")] = False,
    as_json: AsJson = False,
) -> None:
    """Plan a training step under a budget: what is stored, what is recomputed, and why."""
    import gradstow as gs
    from gradstow.report import plan_json, plan_text

    with results(as_json) as emit:
        check_budgets(budget)
        check_writable(out, "the plan", target)
        step = build.step(target, batch)
        with Meter("planning") as meter:
            found = gs.plan(
                **step,
                **rules.keywords(),
                budget=budget,
                effort=effort,
                codegen=codegen,
                device=device,
                progress=meter,
            )
        data = {"target": target, **plan_json(found)}
        text = plan_text(found, limit=None, free=True) if everything else plan_text(found)
        if out is not None:
            found.save(out)
            data["file"] = str(out)
            text += f"\nThe plan is in {out}: gs.stow(model, plan=gs.Plan.load({str(out)!r}))"
        emit(text, data)
