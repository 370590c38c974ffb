"""What commands print: results on stdout, progress on stderr, one clean JSON document where asked for."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gradstow._errors import BudgetTooSmall, GradstowError
from gradstow.cli._blame import blame

Emit = Callable[[str, Mapping[str, Any]], None]
_PATIENCE = 2.0  # seconds before progress is shown


@contextmanager
def results(as_json: bool) -> Iterator[Emit]:
    """Yields ``emit(text, data)``, which prints the one that was asked for.

    With ``as_json`` everything else that writes to stdout, below Python too (user code, native
    libraries), goes to stderr, and an error of ours becomes the document, where there is none yet. What the user's
    own code raises becomes an error of ours.
    """
    if not as_json:
        with _blamed():
            yield lambda text, _data: print(text, flush=True)
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    document: list[Mapping[str, Any]] = []
    try:
        with redirect_stdout(sys.stderr), _blamed():
            yield lambda _text, data: document.append(data)
    except GradstowError as error:
        document = document or [_error_document(error)]
        raise
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
        for data in document:
            print(json.dumps(data, indent=1), flush=True)


@contextmanager
def _blamed() -> Iterator[None]:
    try:
        yield
    except GradstowError:
        raise
    except Exception as error:
        own = blame(error)
        if own is None:
            raise
        raise own from error


class Files:
    """Writes results to files. Where that fails, what took minutes can still be printed before ``check`` tells.

    Attributes:
        written: what was written, and where.
    """

    def __init__(self) -> None:
        self.written: dict[str, str] = {}
        self._failed: GradstowError | None = None

    def write(self, name: str, path: Path | None, write: Callable[[Path], object]) -> None:
        """Call ``write(path)``, where there is a path."""
        if path is None:
            return
        try:
            write(path)
            self.written[name] = str(path)
        except GradstowError as error:
            self._failed = self._failed or error

    @property
    def text(self) -> str:
        """One line per file, each with a line's end in front of it."""
        return "".join(f"\nThe {name} {'are' if name[-1] == 's' else 'is'} in {p}." for name, p in self.written.items())

    def check(self) -> None:
        """Raises the first failure."""
        if self._failed is not None:
            raise self._failed


def _error_document(error: GradstowError) -> dict[str, Any]:
    data: dict[str, Any] = {"error": type(error).__name__, "message": str(error)}
    if isinstance(error, BudgetTooSmall):
        data |= {"budget_bytes": error.budget_bytes, "minimum_bytes": error.minimum_bytes}
    return data


class Meter:
    """Takes ``(stage, done, total)`` and shows it on stderr, once the work has taken two seconds.

    On a terminal that is a bar; elsewhere one line per stage. The work starts with ``stage`` where that is given.
    """

    def __init__(self, stage: str = "") -> None:
        self._console = Console(stderr=True)
        self._started = time.monotonic()
        self._state: tuple[str, int, int] | None = (stage, 0, 0) if stage else None
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
