"""Progress of a training run on stderr: loss, norm, peak and the time that is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gradstow._units import format_bytes, format_seconds

_EVERY = 10.0  # seconds between lines where there is no terminal


class TrainMeter:
    """A bar on a terminal, elsewhere a line every ten seconds.

    The first step plans, and says nothing of how long the others take.
    """

    def __init__(self, total: int, begun: int) -> None:
        self._console = Console(stderr=True)
        self._total, self._begun = total, begun
        self._started = self._told = 0.0  # when the first step was over, which plans
        self._bar: Progress | None = None
        self._task: Any = None

    def __enter__(self) -> TrainMeter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def show(self, done: int, row: Mapping[str, Any]) -> None:
        peak = "" if row["peak_bytes"] is None else f"  peak {format_bytes(row['peak_bytes'])}"
        skipped = "  skipped" if row["skipped"] else ""
        text = f"loss {row['loss']:.4f}  norm {row['grad_norm']:.3g}{peak}{skipped}"
        if self._console.is_terminal:
            self._show_bar(done, text)
            return
        now = time.monotonic()
        if not self._started:
            self._started = self._told = now
            self._begun = done
        if now - self._told >= _EVERY:
            left = (now - self._started) / max(1, done - self._begun) * (self._total - done)
            print(
                f"gradstow: step {done} of {self._total}  {text}  {format_seconds(left)} left",
                file=sys.stderr,
                flush=True,
            )
            self._told = now

    def _show_bar(self, done: int, text: str) -> None:
        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
            self._bar = Progress(*columns, *times, console=self._console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task("training", total=self._total, completed=self._begun)
        self._bar.update(self._task, description=text, completed=done)
