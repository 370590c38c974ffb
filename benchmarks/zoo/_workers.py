"""Tries in processes of their own, so that a crash, a hang or a leak of one does not reach the others."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import multiprocessing.connection
import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PRELOADED = ["torch", "torch._dynamo", "timm", "torchvision", "transformers", "gradstow._api", "zoo._attempt"]


@dataclass(frozen=True)
class Limits:
    """Of one try; ``guess`` leaves out the timing of ops, whose working memory is measured all the same."""

    seconds: float
    gib: float
    threads: int
    guess: bool


@dataclass
class _Running:
    name: str
    process: Any
    answer: Path
    started: float
    seconds: float


def run_all(
    names: Sequence[str],
    heavy: Callable[[str], bool],
    jobs: int,
    limits: Limits,
    done: Callable[[dict[str, Any]], None],
) -> None:
    """Try all; heavy ones come last and alone. ``done`` gets each row as it is found."""
    paths = [sys.path[0], os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)  # the server finds this package
    context = multiprocessing.get_context("forkserver")  # one import of the libraries serves all
    context.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        light = [name for name in names if not heavy(name)]
        _run(light, jobs, context, Path(folder), limits, done)
        whole = Limits(3 * limits.seconds, 4 * limits.gib, limits.threads * jobs, limits.guess)
        _run([name for name in names if heavy(name)], 1, context, Path(folder), whole, done)


def _run(
    names: Sequence[str], jobs: int, context: Any, folder: Path, limits: Limits, done: Callable[[dict[str, Any]], None]
) -> None:
    waiting, running = list(names), []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_start(waiting.pop(0), context, folder, limits))
            multiprocessing.connection.wait([r.process.sentinel for r in running], timeout=1.0)
            for one in list(running):
                row = _ended(one)
                if row is not None:
                    running.remove(one)
                    done(row)
    finally:
        for one in running:
            one.process.kill()


def _start(name: str, context: Any, folder: Path, limits: Limits) -> _Running:
    answer = folder / f"{name.replace(':', '-')}.json"
    process = context.Process(target=_work, args=(name, str(answer), limits), daemon=True)
    process.start()
    return _Running(name, process, answer, time.monotonic(), limits.seconds)


def _ended(one: _Running) -> dict[str, Any] | None:
    seconds = time.monotonic() - one.started
    if one.process.is_alive():
        if seconds < one.seconds:
            return None
        one.process.kill()
        one.process.join()
        return {"model": one.name, "outcome": "timeout", "note": f"not done in {one.seconds:.0f} s", "seconds": seconds}
    one.process.join()
    if one.answer.exists():
        row: dict[str, Any] = json.loads(one.answer.read_text())
        return row
    note = f"the process ended with code {one.process.exitcode}"
    return {"model": one.name, "outcome": "crashed", "note": note, "seconds": seconds}


def _work(name: str, answer: str, limits: Limits) -> None:
    """In the child: one try under its limits; its output is kept from the terminal."""
    quiet = os.open(f"{answer}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    most = int(limits.gib * (1 << 30))
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    from zoo._attempt import attempt

    gc.freeze()  # what the libraries made at import need not be looked through again and again

    torch.set_num_threads(limits.threads)
    with guessed_seconds() if limits.guess else contextlib.nullcontext():
        try:
            row = attempt(name)
        except MemoryError as error:
            row = {"model": name, "outcome": "failed", "note": f"more than {limits.gib} GiB: {error}"}
        except BaseException as error:
            traceback.print_exc()
            row = {"model": name, "outcome": "failed", "note": f"{type(error).__name__}: {error}"[:300]}
    part = Path(f"{answer}.part")
    part.write_text(json.dumps(row))
    part.rename(answer)


@contextlib.contextmanager
def guessed_seconds() -> Iterator[None]:
    """Every op takes the same time; what it needs beside its outputs is measured, since budgets depend on it."""
    from gradstow.cost import _measure

    measured = _measure._seconds
    _measure._seconds = lambda _machine, _signature: 1e-5
    try:
        yield
    finally:
        _measure._seconds = measured
