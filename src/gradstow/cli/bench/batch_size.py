"""``gradstow bench batch-size``: what a larger batch does to speed, memory and accuracy, on real images."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradstow.cli._input import InputError
from gradstow.cli._options import AsJson, Image
from gradstow.cli._output import results
from gradstow.cli._train_options import OPTIMIZERS, training_optimizer
from gradstow.cli.bench import _columns as column
from gradstow.cli.bench._columns import Column
from gradstow.cli.bench._options import Csv, Data, Seed, check_counts, check_file
from gradstow.cli.bench._refused import Row
from gradstow.cli.bench._table import Table, data_name

if TYPE_CHECKING:
    from gradstow.cli._output import Meter
    from gradstow.cli._trained import Job

EXAMPLE = "Example: gradstow bench batch-size --model small --batches 32,128 --epochs 2 --csv batch_size.csv"
COLUMNS = (
    Column("batch", "batch", naming=True),
    Column("scaled", "scaled", lambda value: "yes" if value else "no", naming=True),
    Column("lr", "lr", "{:.4g}".format, naming=True),
    Column("steps", "steps", naming=True),
    Column("images_per_second", "images/s", "{:.1f}".format),
    Column("flops_per_image"),
    Column("utilisation", "utilisation", column.share),
    column.STEP_PEAK,
    column.ACCURACY,
    Column("loss"),
)
_RATES = {"sgd": 0.01}  # what the small network learns best with at batch 32
_MODELS = {"resnet50": "torchvision:resnet50"}
_SIDES = {"small": 28, "resnet50": 32}  # a CPU trains ResNet-50 on digits of this size in minutes, not in hours
_REFUSALS = (RuntimeError, ValueError, AssertionError)  # how models refuse an image or a batch


@dataclass(frozen=True)
class _Setting:
    """How every row is trained; ``base`` is the batch that ``lr`` is right for."""

    make: Callable[[int], Job]
    optimizer: str
    lr: float
    rule: str
    base: int
    epochs: int
    most: int | None
    seed: int

    def steps(self, job: Job) -> int:
        whole = self.epochs * job.per_epoch
        return whole if self.most is None else min(whole, self.most)


def batch_size(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            help="resnet50 (on images of 32 pixels, if not told otherwise), small (a residual network of 0.2 million "
            "weights), or a target of images.",
        ),
    ] = "resnet50",
    data: Data = None,
    batches: Annotated[
        str, typer.Option("--batches", help="Batch sizes, apart by commas or blanks; --lr is for the first one.")
    ] = "32,128,512",
    epochs: Annotated[int, typer.Option("--epochs", help="Times that all data is seen, the same for every row.")] = 5,
    steps: Annotated[
        int | None, typer.Option("--steps", help="Steps of a row at most, to see speed and memory without waiting.")
    ] = None,
    optimizer: Annotated[str, typer.Option("--optimizer", help="sgd, adamw, lars or lamb.")] = "sgd",
    lr: Annotated[float | None, typer.Option("--lr", help="Learning rate for the first batch size.")] = None,
    rule: Annotated[str, typer.Option("--rule", help="linear, or sqrt as is usual for adamw and lamb.")] = "linear",
    image: Image = None,
    seed: Seed = 0,
    out: Csv = None,
    as_json: AsJson = False,
) -> None:
    """Train at several batch sizes, with the learning rate left alone and scaled with a warm-up."""
    from gradstow.cli.bench._flops import matmul_peak
    from gradstow.cli.bench._images import image_set

    with results(as_json) as emit:
        sizes = _sizes(batches)
        if epochs < 1:
            raise InputError(f"--epochs {epochs} trains nothing. Give at least 1.")
        check_counts(**({} if steps is None else {"steps": steps}))
        if optimizer not in OPTIMIZERS or rule not in ("linear", "sqrt"):
            raise InputError(
                f"--optimizer {optimizer} --rule {rule} is not known. Choose one of {', '.join(OPTIMIZERS)}; and "
                "linear or sqrt."
            )
        check_file(out, COLUMNS, model)
        name = image_set("batch-size", data)
        rate = {**OPTIMIZERS, **_RATES}[optimizer] if lr is None else lr
        setting = _Setting(_maker(model, name, image, seed), optimizer, rate, rule, sizes[0], epochs, steps, seed)
        shown = data_name(name)
        settings = {"model": model, "data": shown, "base_batch": sizes[0], "optimizer": optimizer, "epochs": epochs}
        settings |= {"image": image or _SIDES.get(model), "seed": seed}
        peak = matmul_peak()
        about = f"{model} on {shown}, {optimizer}; scaled: {rule} from batch {sizes[0]}, one epoch of warm-up"
        table = Table("batch-size", about, COLUMNS, settings, out, {"matmul_flops": peak})
        table.notes = [
            f"utilisation: floating-point operations of forward and backward, of the {peak / 1e9:.1f} GFLOP/s that a "
            "float32 matrix product reaches here"
        ]
        table.measure(partial(_rows, setting, sizes, peak), emit)


def _sizes(text: str) -> list[int]:
    found = text.replace(",", " ").split()
    if not found or any(not part.isdecimal() or int(part) < 1 for part in found):
        raise InputError(f"--batches {text!r} are no batch sizes. Give numbers such as 32,128,512.")
    return list(dict.fromkeys(int(part) for part in found))


def _maker(model: str, data: str, image: int | None, seed: int) -> Callable[[int], Job]:
    """A fresh model and its data, for a batch size."""
    from gradstow.cli._trained import build_job

    side, target = image or _SIDES.get(model), _MODELS.get(model, model)
    if model == "small":
        return lambda size: _small_job(data, size, image or _SIDES["small"], seed)
    return lambda size: build_job(target, data=data, batch=size, seq=1, image=side, attn=None, seed=seed, device="cpu")


def _small_job(data: str, size: int, image: int, seed: int) -> Job:
    import torch

    from gradstow.cli._data import Order, open_set
    from gradstow.cli._trained import job_of, mean_loss
    from gradstow.cli.bench._networks import residual

    channels = 1 if data == "mnist" else 3
    samples = open_set(data, channels=channels, side=image, seq=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = residual(channels, samples.classes or 10)
    return job_of("small", model, samples, lambda pair: pair, mean_loss, Order(len(samples), size, seed), size, "cpu")


def _rows(setting: _Setting, sizes: list[int], peak: float, meter: Meter) -> Iterator[Row]:
    """A row for each size, with and without scaling; ``peak``: the FLOP/s of a matrix product."""
    asked = [(size, scaled) for size in sizes for scaled in (False, True) if not scaled or size != sizes[0]]
    totals = {size: setting.steps(setting.make(size)) for size in sizes}  # a batch too large is refused at once
    whole, done = sum(totals[size] for size, _ in asked), 0
    for size, scaled in asked:
        name = f"batch {size}{', scaled' if scaled else ''}"

        def tick(step: int, name: str = name, before: int = done) -> None:
            meter(name, before + step, whole)

        tick(0)
        yield _row(setting, size, scaled, peak, tick)
        done += totals[size]


def _row(setting: _Setting, size: int, scaled: bool, peak: float, tick: Callable[[int], None]) -> Row:
    import torch

    from gradstow.train._large import linear_warmup, scaled_lr
    from gradstow.train._step import TrainStep

    job = setting.make(size)
    if job.judge is None or job.per_epoch == 0:
        raise InputError("this model has no data to judge it by. Give --data.")
    step_peak, flops = _tried(job)
    lr = scaled_lr(setting.lr, size, setting.base, rule=setting.rule) if scaled else setting.lr
    optimizer = training_optimizer(setting.optimizer, job.model, lr)
    schedule = (
        linear_warmup(optimizer, job.per_epoch, start=setting.lr / lr if lr > setting.lr else None) if scaled else None
    )
    torch.manual_seed(setting.seed)
    step = TrainStep(job.model, optimizer, loss=job.loss, scheduler=schedule)
    total, started, loss = setting.steps(job), time.perf_counter(), float("nan")
    for number in range(total):
        loss = step(job.batch(number)).loss
        tick(number + 1)
    seconds = time.perf_counter() - started
    _name, value = job.judge()
    return {
        "batch": size,
        "scaled": scaled,
        "lr": lr,
        "steps": total,
        "images_per_second": total * size / seconds,
        "flops_per_image": flops / size,
        "utilisation": flops * total / seconds / peak,
        "step_peak_bytes": step_peak,
        "accuracy": value,
        "loss": loss,
    }


def _tried(job: Job) -> tuple[int, int]:
    """The step peak and the floating-point operations, measured on a copy, whose statistics are not the model's.

    Raises:
        InputError: the model does not take these images, or so few of them.
    """
    import torch

    import gradstow as gs
    from gradstow.cli.bench._flops import counted_flops

    twin, batch = copy.deepcopy(job.model), job.batch(0)
    try:
        with torch.random.fork_rng(devices=[]):
            with gs.measure_peak("cpu") as memory:
                _step(job, twin, batch)
            twin.zero_grad(set_to_none=True)
            flops = counted_flops(lambda: _step(job, twin, batch))
    except _REFUSALS as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"{job.name} cannot be trained at batch {job.batch_size}: {why} Give another --image or --batches."
        ) from error
    return memory.peak_bytes, flops


def _step(job: Job, model: Any, batch: Any) -> None:
    from gradstow._api import default_forward
    from gradstow.capture import find_loss

    output = default_forward(batch)(model, batch)
    loss = find_loss(output) if job.loss is None else job.loss(output, batch)
    del output
    assert loss is not None
    loss.backward()
