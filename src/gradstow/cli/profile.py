"""``gradstow profile``: where the memory of a target's training step goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gradstow._units import parse_budget
from gradstow.cli._input import InputError, check_writable
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

EXAMPLE = "Example: gradstow profile torchvision:resnet50 --batch 8 --budget 60% --html resnet50.html"
_ENDINGS = (".png", ".svg", ".pdf")


def profile(
    target: Text,
    batch: Batch = None,
    budget: Budget = None,
    policy: Policy = None,
    lossy: Lossy = None,
    offload: Offload = None,
    measure: Annotated[bool, typer.Option("--measure", help="Also run real steps, and show both.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write the page, one file that needs no network.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the steps for Perfetto or chrome://tracing.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw memory over the step to a PNG, SVG or PDF file.")] = None,
    points: Annotated[int, typer.Option(help="Budgets to plan for, for the page's frontier; takes longer.")] = 0,
    depth: Annotated[int, typer.Option(help="How deep the tree of modules is shown.")] = 3,
    device: Annotated[str | None, typer.Option(help="Profile for a device elsewhere: cuda:h100, cuda:t4, ...")] = None,
    seq: Seq = 256,
    attn: Attn = None,
    image: Image = None,
    optimizer: Optimizer = "none",
    as_json: AsJson = False,
) -> None:
    """Show what fills memory at the peak of a training step: by part, module, op, line and tensor."""
    import gradstow as gs
    from gradstow.cli._targets import build_target

    with results(as_json) as emit:
        if budget is not None:
            parse_budget(budget)  # before anything takes time
        _check(points, depth, picture)
        for name, path in (("page", html), ("trace", trace), ("picture", picture)):
            check_writable(path, f"the {name}")
        made = build_target(target, batch, seq=seq, attn=attn, image=image)
        with Meter() as meter:
            meter("profiling", 0, 0)
            found = gs.profile(
                made.model,
                made.batch,
                loss=made.loss,
                optimizer=make_optimizer(optimizer, made.model),
                budget=budget,
                policy=policy_of(policy),
                lossy=lossy_of(lossy),
                offload=offload,
                measure=measure,
                points=points,
                device=device,
                progress=meter,
            )
        data: dict[str, Any] = {"target": made.name, **found.to_json(), "files": {}}
        text = found.text(depth=depth)
        for name, path, write in (
            ("page", html, found.save_html),
            ("trace", trace, found.save_trace),
            ("picture", picture, found.save_picture),
        ):
            if path is not None:
                write(path)
                data["files"][name] = str(path)
                text += f"\nThe {name} is in {path}."
        emit(text, data)


def _check(points: int, depth: int, picture: Path | None) -> None:
    """Refuse what would fail after minutes."""
    if points == 1 or points < 0:
        raise InputError(f"--points {points} makes no frontier. Give at least 2, or 0 for none.")
    if depth < 0:
        raise InputError(f"--depth {depth} is no depth. Give 0 for the whole model as one line, or more.")
    if picture is not None and picture.suffix.lower() not in _ENDINGS:
        raise InputError(f"{picture} is no kind of picture that can be drawn. End its name with {', '.join(_ENDINGS)}.")
