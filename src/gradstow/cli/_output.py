"""What commands print: results on stdout, progress on stderr, one clean JSON document where asked for."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gradstow._errors import BudgetTooSmall, GradstowError

Emit = Callable[[str, Mapping[str, Any]], None]
_PATIENCE = 2.0  # seconds before progress is shown


@contextmanager
def results(as_json: bool) -> Iterator[Emit]:
    """Yields ``emit(text, data)``, which prints the one that was asked for.

    With ``as_json`` everything else that writes to stdout, below Python too (user code, native
    libraries), goes to stderr, and an error of ours becomes the document.
    """
    if not as_json:
        yield lambda text, _data: print(text, flush=True)
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    document: list[Mapping[str, Any]] = []
    try:
        with redirect_stdout(sys.stderr):
            yield lambda _text, data: document.append(data)
    except GradstowError as error:
        document = [_error_document(error)]
        raise
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
        for data in document:
            print(json.dumps(data, indent=1), flush=True)


def _error_document(error: GradstowError) -> dict[str, Any]:
    data: dict[str, Any] = {"error": type(error).__name__, "message": str(error)}
    if isinstance(error, BudgetTooSmall):
        data |= {"budget_bytes": error.budget_bytes, "minimum_bytes": error.minimum_bytes}
    return data


class Meter:
    """Takes ``(stage, done, total)`` and shows it on stderr, once the work has taken two seconds.

    On a terminal that is a bar; elsewhere one line per stage.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._started = time.monotonic()
        self._state: tuple[str, int, int] | None = None
        self._told = ""
        self._bar: Progress | None = None
        self._task: Any = None
        self._lock = threading.Lock()
        self._timer = threading.Timer(_PATIENCE, self._show)
        self._timer.daemon = True

    def __enter__(self) -> Meter:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
                self._bar = None
            self._started = float("inf")  # a late call shows nothing

    def __call__(self, stage: str, done: int, total: int) -> None:
        with self._lock:
            self._state = (stage, done, total)
        if time.monotonic() - self._started >= _PATIENCE:
            self._show()

    def _show(self) -> None:
        with self._lock:
            if self._state is None or self._started == float("inf"):
                return
            stage, done, total = self._state
            if not self._console.is_terminal:
                if stage != self._told:
                    print(f"gradstow: {stage} ...", file=sys.stderr, flush=True)
                    self._told = stage
                return
            if self._bar is None:
                columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
                self._bar = Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True)
                self._bar.start()
                self._task = self._bar.add_task(stage)
            self._bar.update(self._task, description=stage, completed=done, total=total or None)
