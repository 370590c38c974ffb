"""``gradstow train``: train a target inside a budget, with a log, checkpoints and a way to go on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradstow.cli._input import InputError
from gradstow.cli._options import AsJson, Attn, Budget, Image, Seq, check_budgets
from gradstow.cli._output import results
from gradstow.cli._train_options import Precision, check_precision, micro_batch_of

EXAMPLE = "Example: gradstow train mnist --budget 75% --epochs 1 --save run.pt --log run.csv"

_INTERRUPTED = 130
_SEEDS = 2**32  # more is no seed for all generators


def train(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="mnist or text (a small network and its data), or as for the other commands: torchvision:NAME, "
            "timm:NAME, transformers:NAME, path/to/file.py:make.",
            show_default=False,
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="mnist, fashion, text, the folder of CIFAR-10, or of images by class; else the target's own batch, "
            "over and over.",
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option("--batch", help="Samples of a step; 64 for data sets.")] = None,
    budget: Budget = None,
    micro_batch: Annotated[
        str | None, typer.Option("--micro-batch", help='A number, "none", or "auto" (the default under a budget).')
    ] = None,
    precision: Precision = "fp32",
    epochs: Annotated[int | None, typer.Option("--epochs", help="Times that all data is seen; 1 by default.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Steps in all, instead of epochs.")] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="Learning rate; each optimizer has its own default.")] = None,
    optimizer: Annotated[str, typer.Option("--optimizer", help="sgd, adamw, lars or lamb.")] = "adamw",
    clip: Annotated[float | None, typer.Option("--clip", help="Largest norm of all gradients together.")] = None,
    seed: Annotated[
        int, typer.Option("--seed", min=-_SEEDS, max=_SEEDS, help="Of the weights, the order of the data and dropout.")
    ] = 0,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    save: Annotated[Path | None, typer.Option("--save", help="Checkpoint file, written every --save-every.")] = None,
    save_every: Annotated[int, typer.Option("--save-every", help="Steps between checkpoints.")] = 100,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the file of --save, bit for bit.")] = False,
    log: Annotated[Path | None, typer.Option("--log", help="One row per step: run.csv or run.jsonl.")] = None,
    seq: Seq = 256,
    attn: Attn = None,
    image: Image = None,
    as_json: AsJson = False,
) -> int:
    """Train a model inside a budget; Ctrl-C saves, and --resume goes on with the same numbers."""
    from gradstow.cli._train_run import Run, Settings, run

    with results(as_json) as emit:
        check_budgets(budget)
        check_precision(precision)
        _check_numbers(epochs, steps, batch, save_every, clip)
        _check_files(save, resume)
        settings = Settings(
            target=target,
            data=data,
            batch=batch,
            seq=seq,
            image=image,
            attn=attn,
            seed=seed,
            precision=precision,
            optimizer=optimizer,
            lr=lr,
            clip=clip,
        )
        wanted = Run(
            settings, budget, micro_batch_of(micro_batch, budget), epochs, steps, device, save, save_every, resume, log
        )
        text, found = run(wanted)
        emit(text, found)
        return _INTERRUPTED if found["interrupted"] else 0


def _check_numbers(
    epochs: int | None, steps: int | None, batch: int | None, save_every: int, clip: float | None
) -> None:
    if epochs is not None and steps is not None:
        raise InputError("--epochs and --steps exclude each other. Give one of them.")
    for name, value in (("epochs", epochs), ("steps", steps), ("batch", batch), ("save-every", save_every)):
        if value is not None and value < 1:
            raise InputError(f"--{name} {value} does nothing. Give at least 1.")
    if clip is not None and not clip > 0:
        raise InputError(f"--clip {clip} leaves no gradient. Give a norm above 0.")


def _check_files(save: Path | None, resume: bool) -> None:
    if resume and save is None:
        raise InputError("--resume needs the checkpoint: give its file with --save.")
    if save is None:
        return
    if save.is_dir() or not save.absolute().parent.is_dir():
        raise InputError(f"the checkpoint cannot be written to {save}: it is a folder, or its folder does not exist.")
    if resume and not save.exists():
        raise InputError(f"there is no checkpoint {save} to go on from. Leave --resume out to begin.")
    if save.exists() and not resume:
        raise InputError(f"the checkpoint {save} exists. Add --resume to go on from it, or name another file.")
