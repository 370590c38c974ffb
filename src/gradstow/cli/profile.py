"""``gradstow profile``: where the memory of a target's training step goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradstow.cli._input import InputError, check_outputs, check_picture
from gradstow.cli._options import AsJson, Batch, Budget, Build, Rules, Text, check_budgets
from gradstow.cli._output import Files, Meter, results
from gradstow.cli._spread import spread

EXAMPLE = "Example: gradstow profile torchvision:resnet50 --batch 8 --budget 60% --html resnet50.html"


@spread
def profile(
    *,
    target: Text,
    batch: Batch = None,
    budget: Budget = None,
    rules: Rules,
    measure: Annotated[bool, typer.Option("--measure", help="Also run real steps, and show both.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write the page, one file that needs no network.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the steps for Perfetto or chrome://tracing.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw memory over the step to a PNG, SVG or PDF file.")] = None,
    cuda_snapshot: Annotated[
        Path | None,
        typer.Option(help="With --measure: do so on CUDA, and write its memory for pytorch.org/memory_viz."),
    ] = None,
    points: Annotated[int, typer.Option(help="Budgets to plan for, for the page's frontier; takes longer.")] = 0,
    depth: Annotated[int, typer.Option(help="How deep the tree of modules is shown.")] = 3,
    device: Annotated[str | None, typer.Option(help="Profile for a device elsewhere: cuda:h100, cuda:t4, ...")] = None,
    build: Build,
    as_json: AsJson = False,
) -> None:
    """Show what fills memory at the peak of a training step: by part, module, op, line and tensor."""
    import gradstow as gs

    with results(as_json) as emit:
        check_budgets(budget)
        _check(points, depth)
        outputs = {"the page": html, "the trace": trace, "the picture": picture, "the CUDA snapshot": cuda_snapshot}
        check_outputs(outputs, target)
        check_picture(picture)
        _check_cuda(cuda_snapshot, measure)
        step = build.step(target, batch, None if cuda_snapshot is None else "cuda")
        with Meter("profiling") as meter:
            found = gs.profile(
                **step,
                **rules.keywords(),
                budget=budget,
                measure=measure,
                points=points,
                device=device,
                cuda_snapshot=cuda_snapshot,
                progress=meter,
            )
        files = Files()
        files.write("page", html, found.save_html)
        files.write("trace", trace, found.save_trace)
        files.write("picture", picture, found.save_picture)
        text = found.text(depth=depth) + files.text
        if cuda_snapshot is not None:
            files.written["cuda_snapshot"] = str(cuda_snapshot)
            text += f"\nThe CUDA snapshot is in {cuda_snapshot}: open it at https://pytorch.org/memory_viz."
        emit(text, {"target": target, **found.to_json(), "files": files.written})
        files.check()


def _check(points: int, depth: int) -> None:
    """Refuse what would fail after minutes."""
    if points == 1 or points < 0:
        raise InputError(f"--points {points} makes no frontier. Give at least 2, or 0 for none.")
    if depth < 0:
        raise InputError(f"--depth {depth} is no depth. Give 0 for the whole model as one line, or more.")


def _check_cuda(cuda_snapshot: Path | None, measure: bool) -> None:
    if cuda_snapshot is None:
        return
    if not measure:
        raise InputError("--cuda-snapshot records real steps, and none are asked for. Add --measure.")
    import torch

    if not torch.cuda.is_available():
        raise InputError(
            "--cuda-snapshot records CUDA's memory, and there is no CUDA device here. Leave it out; --html and --trace "
            "show the predicted step without one."
        )
