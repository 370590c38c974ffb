"""``gradstow verify``: prove that a target trains to the same numbers, and show both peaks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradstow._units import parse_budget
from gradstow.cli._input import InputError
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

EXAMPLE = "Example: gradstow verify torchvision:resnet18 --batch 4 --budget 90%"


def verify(
    target: Text,
    batch: Batch = None,
    budget: Budget = None,
    policy: Policy = None,
    lossy: Lossy = None,
    offload: Offload = None,
    plan: Annotated[Path | None, typer.Option(help="A plan file, instead of a budget.")] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps to compare.")] = 3,
    seq: Seq = 256,
    attn: Attn = None,
    image: Image = None,
    optimizer: Optimizer = "none",
    as_json: AsJson = False,
) -> int:
    """Train plain and planned, compare every bit, measure both peaks. Fails where they differ."""
    import gradstow as gs
    from gradstow.cli._targets import build_target

    with results(as_json) as emit:
        if steps < 1:
            raise InputError(f"--steps {steps} compares nothing. Give at least 1.")
        if plan is not None and budget is not None:
            raise InputError("--plan and --budget exclude each other: a plan was made for its own budget.")
        if budget is not None:
            parse_budget(budget)  # before anything takes time
        loaded = None if plan is None else gs.Plan.load(plan)
        made = build_target(target, batch, seq=seq, attn=attn, image=image)
        with Meter() as meter:
            meter("verifying", 0, 0)
            proof = gs.verify(
                made.model,
                made.batch,
                loss=made.loss,
                optimizer=make_optimizer(optimizer, made.model),
                budget=budget,
                plan=loaded,
                policy=policy_of(policy),
                lossy=lossy_of(lossy),
                offload=offload,
                steps=steps,
                progress=meter,
            )
        emit(str(proof), {"target": made.name, **proof.to_json()})
    return 0 if proof.ok else 1
