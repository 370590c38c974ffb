"""``gradstow frontier``: time against peak for a target, from 100 % down to the smallest peak."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradstow.cli._input import InputError, check_writable
from gradstow.cli._options import (
    AsJson,
    Attn,
    Batch,
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

EXAMPLE = "Example: gradstow frontier torchvision:resnet50 --batch 8 --out frontier.png"


def frontier(
    target: Text,
    batch: Batch = None,
    points: Annotated[int, typer.Option(help="How many budgets to plan for.")] = 20,
    out: Annotated[Path | None, typer.Option(help="Draw the frontier to this PNG, SVG or PDF file.")] = None,
    seq: Seq = 256,
    attn: Attn = None,
    image: Image = None,
    optimizer: Optimizer = "none",
    policy: Policy = None,
    lossy: Lossy = None,
    offload: Offload = None,
    as_json: AsJson = False,
) -> None:
    """Show time against memory for a target: one row per budget, with the proven bound."""
    import gradstow as gs
    from gradstow.cli._targets import build_target

    with results(as_json) as emit:
        if points < 2:
            raise InputError(f"--points {points} makes no frontier. Give at least 2.")
        check_writable(out, "the picture")
        made = build_target(target, batch, seq=seq, attn=attn, image=image)
        with Meter() as meter:
            meter("planning", 0, 0)
            found = gs.frontier(
                made.model,
                made.batch,
                loss=made.loss,
                optimizer=make_optimizer(optimizer, made.model),
                points=points,
                policy=policy_of(policy),
                lossy=lossy_of(lossy),
                offload=offload,
                progress=meter,
            )
        data, text = {"target": made.name, **found.to_json()}, str(found)
        if out is not None:
            found.save_picture(out)
            data["file"] = str(out)
            text += f"\nThe picture is in {out}."
        emit(text, data)
