"""``gradstow bench batch-size``: what a larger batch does to speed, memory and accuracy, on real images."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradstow._units import format_bytes
from gradstow.cli._input import InputError
from gradstow.cli._options import AsJson, Image
from gradstow.cli._output import Meter, results
from gradstow.cli._train_options import OPTIMIZERS, training_optimizer

if TYPE_CHECKING:
    from gradstow.cli._trained import Job

FIELDS = (
    "batch", "scaled", "lr", "steps", "images_per_second", "step_peak_bytes", "accuracy", "loss", "optimizer", "epochs",
    "torch",
)  # fmt: skip


_RATES = {"sgd": 0.01}  # what the small network learns best with at batch 32


@dataclass(frozen=True)
class _Setting:
    """How every row is trained; ``base`` is the batch that ``lr`` is right for."""

    make: Callable[[int], Job]
    optimizer: str
    lr: float
    rule: str
    base: int
    epochs: int
    seed: int


def batch_size(
    model: Annotated[
        str, typer.Option("--model", help="small (a residual network of 0.2 million weights), or a target of images.")
    ] = "small",
    data: Annotated[str, typer.Option("--data", help="mnist, or a folder of images by class.")] = "mnist",
    batches: Annotated[
        str, typer.Option("--batches", help="Batch sizes, apart by commas or blanks; --lr is for the first one.")
    ] = "32,128,512",
    epochs: Annotated[int, typer.Option("--epochs", help="Times that all data is seen, the same for every row.")] = 5,
    optimizer: Annotated[str, typer.Option("--optimizer", help="sgd, adamw, lars or lamb.")] = "sgd",
    lr: Annotated[float | None, typer.Option("--lr", help="Learning rate for the first batch size.")] = None,
    rule: Annotated[str, typer.Option("--rule", help="linear, or sqrt as is usual for adamw and lamb.")] = "linear",
    image: Image = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the weights and the order of the data.")] = 0,
    out: Annotated[Path | None, typer.Option("--csv", help="Also write the rows to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train at several batch sizes, with the learning rate left alone and scaled with a warm-up."""
    from gradstow.cli._trained import build_job

    with results(as_json) as emit:
        sizes = _sizes(batches)
        if epochs < 1:
            raise InputError(f"--epochs {epochs} trains nothing. Give at least 1.")
        if optimizer not in OPTIMIZERS or rule not in ("linear", "sqrt"):
            raise InputError(
                f"--optimizer {optimizer} --rule {rule} is not known. Choose one of {', '.join(OPTIMIZERS)}; and "
                "linear or sqrt."
            )
        if data == "text":
            raise InputError("bench batch-size trains on images. Give --data mnist or a folder.")
        if out is not None and not out.absolute().parent.is_dir():
            raise InputError(f"the rows cannot be written to {out}: its folder does not exist.")

        def make(size: int) -> Job:
            if model == "small":
                return _small_job(data, size, image, seed)
            return build_job(model, data=data, batch=size, seq=1, image=image, attn=None, seed=seed, device="cpu")

        rate = {**OPTIMIZERS, **_RATES}[optimizer] if lr is None else lr
        setting = _Setting(make, optimizer, rate, rule, sizes[0], epochs, seed)
        rows = []
        with Meter() as meter:
            asked = [(size, scaled) for size in sizes for scaled in (False, True) if not scaled or size != sizes[0]]
            for number, (size, scaled) in enumerate(asked):
                meter(f"batch {size}{', scaled' if scaled else ''}", number, len(asked))
                rows.append(_row(setting, size, scaled))
        if out is not None:
            _write(out, rows)
        emit(_text(model, data, setting, rows), {"model": model, "data": data, "base_batch": sizes[0], "rows": rows})


def _sizes(text: str) -> list[int]:
    found = text.replace(",", " ").split()
    if not found or any(not part.isdecimal() or int(part) < 1 for part in found):
        raise InputError(f"--batches {text!r} are no batch sizes. Give numbers such as 32,128,512.")
    return list(dict.fromkeys(int(part) for part in found))


def _row(setting: _Setting, size: int, scaled: bool) -> dict[str, Any]:
    import torch

    from gradstow.train._large import linear_warmup, scaled_lr
    from gradstow.train._step import TrainStep

    job = setting.make(size)
    if job.judge is None or job.per_epoch == 0:
        raise InputError("this model has no data to judge it by. Give --data.")
    peak = _step_peak(job)
    lr = scaled_lr(setting.lr, size, setting.base, rule=setting.rule) if scaled else setting.lr
    optimizer = training_optimizer(setting.optimizer, job.model, lr)
    schedule = (
        linear_warmup(optimizer, job.per_epoch, start=setting.lr / lr if lr > setting.lr else None) if scaled else None
    )
    torch.manual_seed(setting.seed)
    step = TrainStep(job.model, optimizer, loss=job.loss, scheduler=schedule)
    total, started, loss = setting.epochs * job.per_epoch, time.perf_counter(), float("nan")
    for number in range(total):
        loss = step(job.batch(number)).loss
    seconds = time.perf_counter() - started
    _name, value = job.judge()
    return {
        "batch": size,
        "scaled": scaled,
        "lr": lr,
        "steps": total,
        "images_per_second": total * size / seconds,
        "step_peak_bytes": peak,
        "accuracy": value,
        "loss": loss,
        "optimizer": setting.optimizer,
        "epochs": setting.epochs,
        "torch": str(torch.__version__),
    }


def _step_peak(job: Job) -> int:
    """Measured on a copy, whose statistics are not the model's."""
    import copy

    import torch

    import gradstow as gs
    from gradstow._api import make_step
    from gradstow.capture import find_loss

    twin, batch = copy.deepcopy(job.model), job.batch(0)
    step = make_step(twin, batch, job.loss, None, None, keep_output=False)
    with gs.measure_peak() as memory, torch.random.fork_rng(devices=[]):
        output = step.call(twin, batch)
        loss = find_loss(output) if job.loss is None else job.loss(output, batch)
        del output
        assert loss is not None
        loss.backward()
    return memory.peak_bytes


def _small_job(data: str, size: int, image: int | None, seed: int) -> Job:
    import torch

    from gradstow.cli._data import Order, open_set
    from gradstow.cli._trained import job_of, mean_loss

    channels = 1 if data == "mnist" else 3
    samples = open_set(data, channels=channels, side=image or 28, seq=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = residual(channels, samples.classes or 10)
    return job_of("small", model, samples, lambda pair: pair, mean_loss, Order(len(samples), size, seed), size, "cpu")


def residual(channels: int, classes: int) -> Any:
    """Like ResNet-18 with a quarter of its depth and width: BatchNorm, four residual blocks."""
    from torch import nn

    class Block(nn.Module):
        def __init__(self, before: int, after: int, stride: int) -> None:
            super().__init__()
            self.first = nn.Sequential(
                nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()
            )
            self.second = nn.Sequential(nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after))
            same = before == after and stride == 1
            self.short = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)

        def forward(self, x: Any) -> Any:
            return nn.functional.relu(self.second(self.first(x)) + self.short(x))

    stem = [nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    blocks = [Block(16, 16, 2), Block(16, 32, 2), Block(32, 64, 2), Block(64, 64, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)


def _text(model: str, data: str, setting: _Setting, rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{model} on {data}, {setting.optimizer}, {setting.epochs} epochs; scaled: {setting.rule} from batch "
        f"{setting.base}, one epoch of warm-up",
        f"{'batch':>6} {'scaled':>7} {'lr':>9} {'steps':>6} {'images/s':>9} {'step peak':>11} {'accuracy':>9}",
    ]
    lines += [
        f"{row['batch']:>6} {'yes' if row['scaled'] else 'no':>7} {row['lr']:>9.4g} {row['steps']:>6} "
        f"{row['images_per_second']:>9.0f} {format_bytes(row['step_peak_bytes']):>11} {row['accuracy']:>9.4f}"
        for row in rows
    ]
    return "\n".join(lines)
