"""``gradstow bench alexnet``: what each way to save memory does to AlexNet, alone and together."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradstow._units import format_bytes
from gradstow.cli._input import InputError
from gradstow.cli._options import AsJson, check_budgets
from gradstow.cli._output import results
from gradstow.cli.bench import _columns as column
from gradstow.cli.bench._options import Csv, Data, Rounds, Seed, Steps, check_counts, check_file
from gradstow.cli.bench._table import Table, data_name

if TYPE_CHECKING:
    from torch import nn

    from gradstow.cli.bench._contest import Contest, Way

EXAMPLE = "Example: gradstow bench alexnet --batch 32 --steps 5 --rounds 3 --csv alexnet.csv"
COLUMNS = (column.WAY, *column.CONTEST)
_SMALLEST_IMAGE = 63  # under that nothing is left after the last pooling
_SEGMENTS = 4  # about the square root of AlexNet's 22 layers
_LEARNING_RATE = 0.01  # the paper's, with its momentum of 0.9


def alexnet(
    batch: Annotated[int, typer.Option("--batch", help="Images in a batch.")] = 128,
    image: Annotated[int, typer.Option("--image", help="Width and height of an image; 63 is the least.")] = 224,
    data: Data = None,
    steps: Steps = 5,
    rounds: Rounds = 5,
    budget: Annotated[
        list[str] | None, typer.Option("--budget", help="Of the planned rows: 70% and 50%; may be given again.")
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option("--skip", help="Leave out rows with this word, such as bf16, which few CPUs are fast with."),
    ] = None,
    seed: Seed = 0,
    out: Csv = None,
    as_json: AsJson = False,
) -> int:
    """AlexNet on real images: plain, checkpointed, bf16, lean layers, blocked layers, planned, and all together."""
    with results(as_json) as emit:
        budgets = budget or ["70%", "50%"]
        check_budgets(*budgets)
        check_counts(batch=batch, steps=steps, rounds=rounds)
        if image < _SMALLEST_IMAGE:
            raise InputError(f"--image {image} is too small for AlexNet's layers. Give at least {_SMALLEST_IMAGE}.")
        check_file(out, COLUMNS)
        chosen = _without(skip or [], _ways(budgets))
        contest, name = _contest(batch, image, data, steps, rounds, seed)
        settings = {"model": "torchvision:alexnet", "data": name, "batch": batch, "image": image, "steps": steps}
        about = f"AlexNet on {name}, batch {batch}, images of {image} pixels"
        table = Table("alexnet", about, COLUMNS, {**settings, "seed": seed}, out)
        table.notes = [
            f"loss: of the last of {steps} steps; equal where it is the same bit for bit in every step",
            "a percentage is of the step peak of what is planned: of bf16 or lean layers where the row has them",
            _first_convolution(contest.model, batch, image),
        ]
        table.measure(partial(contest.run, chosen), emit)
        return 0 if contest.kept_promises() else 1


def _contest(batch: int, image: int, data: str | None, steps: int, rounds: int, seed: int) -> tuple[Contest, str]:
    from gradstow.cli._targets import build_target
    from gradstow.cli._train_options import training_optimizer
    from gradstow.cli.bench._images import image_contest

    contest, samples = image_contest(
        "alexnet",
        data,
        batch,
        image,
        seed,
        make=lambda classes: (
            build_target(f"torchvision:alexnet,num_classes={classes}", 1, image=image, seed=seed).model
        ),
        loss=_loss,
        optimizer=lambda model: training_optimizer("sgd", model, _LEARNING_RATE),
        steps=steps,
        rounds=rounds,
    )
    return contest, data_name(samples.name)


def _loss(output: Any, pair: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(output.float(), pair[1])


def _ways(budgets: list[str]) -> list[Way]:
    import gradstow as gs
    from gradstow.cli.bench._contest import PLAIN, Way, planned

    def lean_and_blocked(model: nn.Module) -> None:
        blocked(model)
        gs.layers.convert(model)

    ways = [
        Way(PLAIN),
        Way(f"checkpointed, {_SEGMENTS} segments", call=_checkpointed),
        Way("bf16", call=_autocast),
        Way("lean layers", gs.layers.convert),
        Way("blocked linear layers", blocked),
    ]
    return [
        *ways,
        *(planned("planned", budget, like=PLAIN) for budget in budgets),
        Way("bf16, lean layers", gs.layers.convert, _autocast),
        planned("bf16, planned", budgets[0], like="bf16", call=_autocast),
        planned("bf16, lean, blocked, planned", budgets[0], first=lean_and_blocked, call=_autocast),
    ]


def _without(skipped: list[str], ways: list[Way]) -> list[Way]:
    """The first way stays, for the others are timed against it."""
    for word in skipped:
        if not any(word in way.name for way in ways[1:]):
            raise InputError(f"--skip {word!r} is in none of the rows {', '.join(way.name for way in ways)}.")
    return [way for n, way in enumerate(ways) if n == 0 or not any(word in way.name for word in skipped)]


def blocked(model: nn.Module) -> None:
    """Give every linear layer the class that cuts its products into blocks, as ``convert`` does with others."""
    from torch import nn

    from gradstow.layers import BlockedLinear

    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = BlockedLinear


def _autocast(model: nn.Module, pair: Any) -> Any:
    import torch

    with torch.autocast("cpu", torch.bfloat16):
        return model(pair[0])


def _checkpointed(model: Any, pair: Any) -> Any:
    from torch import nn
    from torch.utils.checkpoint import checkpoint_sequential

    layers = [*model.features, model.avgpool, nn.Flatten(1), *model.classifier]
    return checkpoint_sequential(layers, _SEGMENTS, pair[0], use_reentrant=False)


def _first_convolution(model: Any, batch: int, image: int) -> str:
    """What its activation takes, beside what it takes in the paper of 2012."""
    import copy

    import torch

    first = copy.deepcopy(model.features[0]).to("meta")
    shape = first(torch.empty(batch, 3, image, image, device="meta")).shape
    here = "×".join(map(str, shape))
    paper = 128 * 96 * 55 * 55 * 4
    return (
        f"first convolution's activation: 128×96×55×55×4 bytes = {format_bytes(paper)} in the original layout; "
        f"torchvision's has {shape[1]} channels: {here}×4 bytes = {format_bytes(shape.numel() * 4)} here"
    )
