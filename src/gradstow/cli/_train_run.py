"""The loop of ``gradstow train``: steps, log, checkpoints, progress."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gradstow._errors import GradstowError
from gradstow._units import format_bytes, format_seconds
from gradstow.capture._places import user_frame
from gradstow.cli._input import InputError
from gradstow.cli._output import Meter
from gradstow.cli._train_log import TrainLog
from gradstow.cli._train_meter import TrainMeter
from gradstow.cli._train_options import training_optimizer
from gradstow.cli._trained import Job, build_job
from gradstow.train._snapshot import out_of_memory
from gradstow.train._step import StepResult, TrainStep

_STOPPED = "gradstow-train.pt"  # where Ctrl-C saves when no file is named


@dataclass(frozen=True)
class Settings:
    """What decides the numbers of a run: a checkpoint goes on only with the same."""

    target: str
    data: str | None
    batch: int | None
    seq: int
    image: int | None
    attn: str | None
    seed: int
    precision: str
    optimizer: str
    lr: float | None
    clip: float | None

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in asdict(self).items():
            if state.get(name) != value:
                raise InputError(
                    f"the checkpoint is of a run with --{name} {state.get(name)}, and this one has {value}. "
                    "Go on with the options of that run."
                )


@dataclass(frozen=True)
class Run:
    """What ``gradstow train`` was asked for."""

    settings: Settings
    budget: str | None
    micro_batch: int | str | None
    epochs: int | None
    steps: int | None
    device: str
    save: Path | None
    save_every: int
    resume: bool
    log: Path | None


def run(wanted: Run) -> tuple[str, dict[str, Any]]:
    """Train; returns what to print and the same as data. Ctrl-C saves, and is one more result."""
    log = None if wanted.log is None else TrainLog(wanted.log)
    if wanted.device not in ("cpu", "cuda") or (wanted.device == "cuda" and not torch.cuda.is_available()):
        raise InputError(f"--device {wanted.device} is not here. Choose cpu{', cuda' * torch.cuda.is_available()}.")
    own = wanted.settings
    job = build_job(
        own.target,
        data=own.data,
        batch=own.batch,
        seq=own.seq,
        image=own.image,
        attn=own.attn,
        seed=own.seed,
        device=wanted.device,
    )
    torch.manual_seed(own.seed)
    with Meter() as meter:
        step = TrainStep(
            job.model,
            training_optimizer(own.optimizer, job.model, own.lr),
            loss=job.loss,
            budget=wanted.budget,
            micro_batch=wanted.micro_batch,
            precision=own.precision,
            clip=own.clip,
            data=own,
            progress=meter,
        )
        if wanted.resume:
            _load(step, wanted.save)
        loop = _Loop(wanted, job, step, log)
        interrupted = loop.run(meter)
    return loop.text(interrupted), loop.data(interrupted)


def _load(step: TrainStep, path: Path | None) -> None:
    assert path is not None
    try:
        step.load(path)
    except GradstowError as error:
        raise InputError(f"{error} Go on with its options, such as --precision and --optimizer.") from error
    except Exception as error:  # torch says in its own ways what does not fit
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"the checkpoint {path} does not fit this run: {first} Go on with its options.") from error


def _failed(error: Exception, number: int, name: str) -> GradstowError:
    """One line for what a step raised. A first step that cannot run is wrong input."""
    line = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else ""
    place = user_frame(traceback.extract_tb(error.__traceback__))
    what = f"step {number + 1} of {name} cannot run: {type(error).__name__}{': ' * bool(line)}{line}"
    what += f" ({place})" if place else ""
    if out_of_memory(error):
        return GradstowError(f"{what}. Give --budget, or a smaller --batch.")
    if number:
        return GradstowError(f"{what}. The last checkpoint is as it was.")
    return InputError(f"{what}. Check the sizes that were given, such as --image, --seq and --batch, and the target.")


class _Loop:
    def __init__(self, wanted: Run, job: Job, step: TrainStep, log: TrainLog | None) -> None:
        self.wanted, self.job, self.step, self.log = wanted, job, step, log
        self.began = self.done
        self.total = wanted.steps or (wanted.epochs or 1) * max(1, job.per_epoch)
        self.last: StepResult | None = None
        self.peak: int | None = None
        self.started = time.perf_counter()
        self.seconds = 0.0
        self.saved: Path | None = None
        self.judged: tuple[str, float] | None = None

    @property
    def done(self) -> int:
        """Windows so far, the skipped ones included: also after Ctrl-C at any moment."""
        return self.step.steps + self.step.skipped_steps

    def run(self, meter: Meter) -> bool:
        """Returns whether Ctrl-C ended it."""
        if self.log is not None:
            self.log.start(self.began)
        try:
            with TrainMeter(self.total, self.began) as shown:
                while self.done < self.total:
                    self._one(shown)
                    meter.__exit__()  # what was planned is planned
            self.seconds = time.perf_counter() - self.started
            if self.job.judge is not None:
                self.judged = self.job.judge()
        except KeyboardInterrupt:
            self.seconds = time.perf_counter() - self.started
            self._save(self.wanted.save or Path(_STOPPED))
            return True
        if self.wanted.save is not None:
            self._save(self.wanted.save)
        return False

    def _one(self, shown: TrainMeter) -> None:
        number = self.done
        batch = self.job.batch(number)
        try:
            result = self.step(batch)
        except GradstowError:
            raise
        except Exception as error:  # of the model, the loss or the allocator
            raise _failed(error, number, self.job.name) from error
        self.last = result
        if result.peak_bytes is not None:
            self.peak = max(self.peak or 0, result.peak_bytes)
        row = self._row(number, result)
        if self.log is not None:
            self.log.write(row)
        shown.show(number + 1, row)
        if self.wanted.save is not None and (number + 1) % self.wanted.save_every == 0:
            self._save(self.wanted.save)

    def _row(self, number: int, result: StepResult) -> dict[str, Any]:
        size = self.job.batch_size
        return {
            "step": number + 1,
            "epoch": number // self.job.per_epoch if self.job.per_epoch else 0,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "clip_at": result.clip_at,
            "skipped": result.skipped,
            "micro_batches": result.micro_batches,
            "peak_bytes": result.peak_bytes,
            "seconds": result.seconds,
            "samples_per_second": None if size is None else size / result.seconds,
            "lr": self.step.optimizers[0].param_groups[0]["lr"],
        }

    def _save(self, path: Path) -> None:
        self.step.save(path)
        self.saved = path

    def data(self, interrupted: bool) -> dict[str, Any]:
        choice = self.step.choice
        return {
            "target": self.job.name,
            "interrupted": interrupted,
            "steps": self.done,
            "of": self.total,
            "resumed_at": self.began,
            "skipped": self.step.skipped_steps,
            "loss": None if self.last is None else self.last.loss,
            **({} if self.judged is None else {self.judged[0]: self.judged[1]}),
            "batch": self.job.batch_size,
            "micro_batch": self.step.micro_batch,
            "peak_bytes": self.peak,
            "budget": self.wanted.budget,
            "seconds": self.seconds,
            "choice": None if choice is None else choice.to_json(),
            "checkpoint": None if self.saved is None else str(self.saved),
            "log": None if self.wanted.log is None else str(self.wanted.log),
            "torch": str(torch.__version__),
        }

    def text(self, interrupted: bool) -> str:
        lines = [] if self.step.choice is None else [str(self.step.choice)]
        where = "stopped after" if interrupted else "trained for"
        skipped = f", {self.step.skipped_steps} of them skipped" if self.step.skipped_steps else ""
        lines.append(
            f"{self.job.name}: {where} {self.done} of {self.total} steps{skipped}, {format_seconds(self.seconds)}"
        )
        if self.last is not None:
            found = "" if self.judged is None else f", {self.judged[0].replace('_', ' ')} {self.judged[1]:.4f}"
            lines.append(f"loss {self.last.loss:.4f}{found}")
        if self.peak is not None:
            kind = "predicted" if self.wanted.device == "cpu" else "measured"
            budget = "" if self.wanted.budget is None else f", budget {self.wanted.budget}"
            lines.append(f"peak {format_bytes(self.peak)} ({kind}){budget}")
        if self.saved is not None:
            lines.append(f"checkpoint {self.saved}")
        if interrupted:
            lines.append(
                f"Go on with the same command and --save {self.saved} --resume: it gives the numbers of a run that was "
                "not stopped."
            )
        return "\n".join(lines)
