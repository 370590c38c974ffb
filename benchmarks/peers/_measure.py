"""One system on one model, beside plain eager in the same process: the row of the table."""

from __future__ import annotations

import re
import statistics
import time
import warnings
from typing import Any

import numpy as np
import torch

import gradstow as gs
from gradstow._stow import plan_of
from gradstow._verify import Trainee, step_peak, twins
from gradstow.capture import resident_bytes, same_randomness
from peers import _models, _numbers, _ways
from peers._models import Subject
from peers._numbers import Numbers
from peers._settings import CODEGEN, COMPILE, WAYS, Job

_MIB = 1 << 20
_TRIES = 4  # budgets, until the smallest is met


def measure(job: Job) -> dict[str, Any]:
    """Columns of the row; what fails is a row, too, with its message."""
    start = time.perf_counter()
    row: dict[str, Any] = {"model": job.model, "kind": job.kind, "peer": job.peer, "setting": job.setting}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            row |= _measured(job) | {"outcome": "measured"}
        except _ways.NotApplicable as error:
            row |= {"outcome": "not applicable", "note": line(error)}
        except _ways.NotInstalled as error:
            row |= {"outcome": "not installed", "note": line(error)}
        except gs.errors.BudgetTooSmall as error:
            row |= {"outcome": "refused", "note": line(error)}
        except Exception as error:
            row |= {"outcome": "failed", "note": f"{type(error).__name__}: {line(error)}"}
    said = [line(w.message) for w in caught if str(w.message).startswith("gradstow")]
    notes = dict.fromkeys(text for text in (row.get("note"), *said) if text)
    return row | {"note": "; ".join(notes), "whole_seconds": time.perf_counter() - start}


def _measured(job: Job) -> dict[str, Any]:
    subject = _models.build(job.model, job.device)
    plain = _trainee(subject)
    expected = _numbers.numbers(plain)
    twin, found = _smallest(subject, job) if job.budget == 0 else _begun(_put_on(subject, job))
    with same_randomness():
        peaks = {"plain_peak_mib": step_peak(plain, job.device) / _MIB, "peak_mib": step_peak(twin, job.device) / _MIB}
        times = timed(plain, twin, job.rounds, job.device)
    plan = plan_of(twin.model) if job.peer in CODEGEN else None
    return {
        "batch": subject.spec.batch,
        "budget_mib": job.budget / _MIB if job.budget else None,
        "first_seconds": found.first_seconds,
        "rerun_ops": None if plan is None else plan.rerun_ops,
        **peaks,
        **times,
        **_judged(subject, job, plain, found, expected),
    }


def _begun(twin: Trainee) -> tuple[Trainee, Numbers]:
    return twin, _numbers.numbers(twin)


def _judged(subject: Subject, job: Job, plain: Trainee, found: Numbers, expected: Numbers) -> dict[str, Any]:
    if job.kind == "eager":
        return _numbers.compared(found, expected)
    random = _numbers.draws(plain, job.device)
    if random and job.peer == COMPILE:
        # Inductor draws random numbers of its own, faster. Eager's are for this comparison alone, in code of its own,
        # and last, since it resets what is compiled.
        torch._dynamo.reset()
        with torch._inductor.config.patch(fallback_random=True):
            found = _numbers.numbers(_put_on(subject, job))
    return _numbers.errors(found, expected, _numbers.reference(plain), random)


def _trainee(subject: Subject) -> Trainee:
    model, optimizer = twins(subject.module, None)
    return Trainee(model, optimizer, lambda module, batch: module(batch), None, subject.batch)


def _put_on(subject: Subject, job: Job) -> Trainee:
    """A copy of the model with the job's system on it."""
    twin = _trainee(subject)
    if job.peer not in CODEGEN:
        WAYS[job.kind][job.key](twin.model, subject.spec)  # type: ignore[arg-type]
        return twin
    assert job.budget is not None
    resident = resident_bytes(subject.module, subject.batch, torch.device(job.device).type).total
    return _stowed(twin, resident + job.budget, job)


def _stowed(twin: Trainee, budget: int, job: Job) -> Trainee:
    gs.stow(twin.model, budget=budget, codegen=CODEGEN[job.peer])
    return twin


def _smallest(subject: Subject, job: Job) -> tuple[Trainee, Numbers]:
    """Within the smallest budget that gradstow names when it refuses one."""
    budget = 1
    for _ in range(_TRIES):
        try:
            return _begun(_stowed(_trainee(subject), budget, job))
        except gs.errors.BudgetTooSmall as error:
            budget = error.minimum_bytes
    raise RuntimeError(f"{budget} bytes, which gradstow named as its smallest budget, were refused")


# ------------------------------------------------------------------------------------------------------- times


def timed(plain: Trainee, twin: Trainee, rounds: int, device: str) -> dict[str, Any]:
    """Both in turn; the ratio of their medians, with an interval."""
    ours, theirs = [], []
    for number in range(-1, rounds):
        order = (plain, twin) if number % 2 == 0 else (twin, plain)
        seconds = {id(trainee): _seconds(trainee, device) for trainee in order}
        if number >= 0:  # the first round warms up
            theirs.append(seconds[id(plain)])
            ours.append(seconds[id(twin)])
    low, high = ratio_interval(ours, theirs)
    middle, other = statistics.median(ours), statistics.median(theirs)
    return {
        "plain_seconds": other,
        "seconds": middle,
        "ratio": middle / other,
        "ratio_low": low,
        "ratio_high": high,
        "rounds": rounds,
    }


def _seconds(trainee: Trainee, device: str) -> float:
    trainee.begin()
    _wait(device)
    start = time.perf_counter()
    trainee.finish()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def ratio_interval(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the ratio of medians, rounds drawn whole; the same samples give the same interval."""
    draws = np.random.default_rng(0).integers(len(ours), size=(2000, len(ours)))
    ratios = np.median(np.asarray(ours)[draws], axis=1) / np.median(np.asarray(theirs)[draws], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), float(high)


def line(error: object) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()[:300]
