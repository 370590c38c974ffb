"""A fresh process per row: caches, memory and settings of one system do not reach the next."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import resource
import signal
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from peers._settings import Job

_PRELOADED = ["torch", "torch._dynamo", "torchvision", "transformers", "gradstow._api", "peers._measure"]
_HEAP = str(32 << 30)


def prepare() -> None:
    """One import of the libraries serves all rows, in a server from which their processes are forked."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    os.environ["HF_HUB_OFFLINE"] = "1"
    # The heap keeps its memory, as a GPU's caching allocator does: else page faults are most of the time.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = _HEAP
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)


def run_alone(job: Job, timeout: float, gib: float) -> dict[str, Any]:
    """The job's row; a crash or a timeout is one, too."""
    start = time.perf_counter()
    row = {"model": job.model, "kind": job.kind, "peer": job.peer, "setting": job.setting}
    # CUDA does not survive a fork
    context = multiprocessing.get_context("forkserver" if job.device == "cpu" else "spawn")
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        process = context.Process(target=_work, args=(job, answer, gib if job.device == "cpu" else 0))
        process.start()
        try:
            process.join(timeout)
            late = process.is_alive()
        finally:
            _end(process)
        if answer.exists():
            found: dict[str, Any] = json.loads(answer.read_text())
            return found
        said = _last_line(answer.with_suffix(".log"))
    row["whole_seconds"] = f"{time.perf_counter() - start:.4g}"
    if late:
        return row | {"outcome": "timeout", "note": f"not done in {timeout:.0f} s"}
    return row | {"outcome": "crashed", "note": f"the process ended with code {process.exitcode}: {said}"}


def _end(process: Any) -> None:
    """And its compilers."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _last_line(log: Path) -> str:
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def _work(job: Job, answer: Path, gib: float) -> None:
    """In the child: a group of its own, its output kept from the terminal."""
    os.setsid()
    quiet = os.open(answer.with_suffix(".log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    if gib:
        most = int(gib * (1 << 30))
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    gc.freeze()  # what the libraries made at import need not be looked through again and again
    import torch

    from peers._measure import measure

    if job.threads:
        torch.set_num_threads(job.threads)
    try:
        row = measure(job)
    except BaseException:
        traceback.print_exc()
        raise
    part = answer.with_suffix(".part")
    part.write_text(json.dumps(row))
    part.rename(answer)


__all__ = ["prepare", "run_alone"]
