"""``gradstow frontier``: time against peak for a target, from 100 % down to the smallest peak."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradstow.cli._input import InputError, check_picture, check_writable
from gradstow.cli._options import AsJson, Batch, Build, Rules, Text
from gradstow.cli._output import Files, Meter, results
from gradstow.cli._spread import spread

EXAMPLE = "Example: gradstow frontier torchvision:resnet50 --batch 8 --out frontier.png"


@spread
def frontier(
    *,
    target: Text,
    batch: Batch = None,
    points: Annotated[int, typer.Option(help="How many budgets to plan for.")] = 20,
    out: Annotated[Path | None, typer.Option(help="Draw the frontier to this PNG, SVG or PDF file.")] = None,
    build: Build,
    rules: Rules,
    as_json: AsJson = False,
) -> None:
    """Show time against memory for a target: one row per budget, with the proven bound."""
    import gradstow as gs

    with results(as_json) as emit:
        if points < 2:
            raise InputError(f"--points {points} makes no frontier. Give at least 2.")
        check_writable(out, "the picture", target)
        check_picture(out)
        step = build.step(target, batch)
        with Meter("planning") as meter:
            found = gs.frontier(**step, **rules.keywords(), points=points, progress=meter)
        data, text = {"target": target, **found.to_json()}, str(found)
        files = Files()
        files.write("picture", out, found.save_picture)
        if files.written:
            data["file"] = str(out)
        emit(text + files.text, data)
        files.check()
