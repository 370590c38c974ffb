"""``gradstow plan``: plan a target's training step under a budget and show the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradstow._units import parse_budget
from gradstow.cli._input import check_writable
from gradstow.cli._options import (
    AsJson,
    Attn,
    Batch,
    Budget,
    Image,
    Lossy,
    Offload,
    Optimizer,
    Policy,
    Seq,
    Text,
    lossy_of,
    make_optimizer,
    policy_of,
)
from gradstow.cli._output import Meter, results

EXAMPLE = "Example: gradstow plan torchvision:resnet50 --batch 8 --budget 60% --out plan.json"


def plan(
    target: Text,
    batch: Batch = None,
    budget: Budget = None,
    policy: Policy = None,
    lossy: Lossy = None,
    offload: Offload = None,
    effort: Annotated[str, typer.Option(help="quick (no solver), normal or thorough.")] = "normal",
    device: Annotated[str | None, typer.Option(help="Plan for a device elsewhere: cuda:h100, cuda:t4, ...")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan to this file.")] = None,
    seq: Seq = 256,
    attn: Attn = None,
    image: Image = None,
    optimizer: Optimizer = "none",
    everything: Annotated[bool, typer.Option("--all", help="Show every value in the table.")] = False,
    as_json: AsJson = False,
) -> None:
    """Plan a training step under a budget: what is stored, what is recomputed, and why."""
    import gradstow as gs
    from gradstow.cli._targets import build_target
    from gradstow.report import plan_json, plan_text

    with results(as_json) as emit:
        if budget is not None:
            parse_budget(budget)  # before anything takes time
        check_writable(out, "the plan")
        made = build_target(target, batch, seq=seq, attn=attn, image=image)
        with Meter() as meter:
            meter("planning", 0, 0)
            found = gs.plan(
                made.model,
                made.batch,
                loss=made.loss,
                optimizer=make_optimizer(optimizer, made.model),
                budget=budget,
                policy=policy_of(policy),
                lossy=lossy_of(lossy),
                offload=offload,
                effort=effort,
                device=device,
                progress=meter,
            )
        data = {"target": made.name, **plan_json(found)}
        text = plan_text(found, limit=None, free=True) if everything else plan_text(found)
        if out is not None:
            found.save(out)
            data["file"] = str(out)
            text += f"\nThe plan is in {out}: gs.stow(model, plan=gs.Plan.load({str(out)!r}))"
        emit(text, data)
