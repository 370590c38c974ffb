"""``gradstow max-batch``: the largest batch of a target that a budget allows, by planning alone."""

from __future__ import annotations

from typing import Annotated

import typer

from gradstow._units import parse_budget
from gradstow.cli._input import InputError
from gradstow.cli._options import (
    AsJson,
    Attn,
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
from gradstow.cli._train_options import Precision, check_precision

EXAMPLE = "Example: gradstow max-batch torchvision:resnet18 --budget 4GiB"


def max_batch(
    target: Text,
    budget: Annotated[str, typer.Option("--budget", help='"6GiB" or "auto".')],
    limit: Annotated[int, typer.Option("--limit", help="The largest batch to try.")] = 65536,
    precision: Precision = "fp32",
    policy: Policy = None,
    lossy: Lossy = None,
    offload: Offload = None,
    effort: Annotated[str, typer.Option(help="quick (no solver), normal or thorough.")] = "normal",
    seq: Seq = 256,
    attn: Attn = None,
    image: Image = None,
    optimizer: Optimizer = "none",
    as_json: AsJson = False,
) -> None:
    """Find the largest batch that trains within a budget, without running out of memory on the way."""
    import gradstow as gs
    from gradstow.cli._targets import build_target
    from gradstow.train._max_batch import max_batch as find

    with results(as_json) as emit:
        parse_budget(budget)  # before anything takes time
        check_precision(precision)
        if limit < 1:
            raise InputError(f"--limit {limit} leaves no batch to try. Give at least 1.")
        example = None if ".py:" in target else 2
        made = build_target(target, example, seq=seq, attn=attn, image=image)
        with Meter() as meter:
            meter("planning", 0, 0)
            found = find(
                made.model,
                made.batch,
                loss=made.loss,
                optimizer=make_optimizer(optimizer, made.model),
                budget=budget,
                limit=limit,
                precision=precision,
                policy=policy_of(policy),
                lossy=lossy_of(lossy),
                offload=offload,
                effort=effort,
                progress=meter,
            )
        emit(
            f"{made.name}\n{found}",
            {"target": made.name, "torch": _torch(), "gradstow": gs.__version__, **found.to_json()},
        )


def _torch() -> str:
    import torch

    return str(torch.__version__)
