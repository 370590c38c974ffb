"""Run the demo's training script in child processes, and watch their memory from outside."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gradstow
from gradstow.cli._demo_child import TOLD, data_bytes

# glibc then gives large blocks back at once, so that a limit on the process follows the allocator
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}
_OF_MEMORY = re.compile(r"memory|alloc|could not create a primitive", re.IGNORECASE)
_SCRIPT = ["-m", "gradstow.cli._demo_child"]
_INTERVAL = 0.02  # seconds between looks at a child's memory

Watch = Callable[[dict[str, Any]], None]


@dataclass
class Run:
    """What one child did.

    Attributes:
        limit_bytes: of private memory; None for no limit.
        code: exit code; negative is a signal.
        losses, bits, seconds: of each step; ``bits`` are the losses in hexadecimal.
        highest_bytes, training_bytes: the most private memory of all, and while it trained.
        told: what the child said last, by kind.
    """

    limit_bytes: int | None = None
    code: int = 0
    losses: list[float] = field(default_factory=list)
    bits: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    highest_bytes: int = 0
    training_bytes: int = 0
    told: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: str = ""

    @property
    def finished(self) -> bool:
        return self.code == 0

    @property
    def out_of_memory(self) -> bool:
        """Whether it ended for want of memory: refused by the allocator, or ended by a signal."""
        return not self.finished and (self.code < 0 or bool(_OF_MEMORY.search(self.last_words)))

    @property
    def last_words(self) -> str:
        """The last line on stderr, without torch's list of native frames; else the signal's name."""
        lines = [line for line in self.errors.splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
        if not lines:
            lines = [line for line in self.errors.splitlines() if line.strip()]
        text = lines[-1].strip() if lines else ""
        if self.code < 0:
            text = f"ended by {signal.Signals(-self.code).name}{f': {text}' if text else ''}"
        return text

    def tail(self, lines: int = 12) -> str:
        return "\n".join(self.errors.rstrip().splitlines()[-lines:])

    def get(self, kind: str, name: str) -> Any:
        return self.told.get(kind, {}).get(name)


def run_child(arguments: list[str], watch: Watch, limit_bytes: int | None = None) -> Run:
    """Run the script to its end. The child is killed when this is interrupted."""
    run = Run(limit_bytes)
    if limit_bytes is not None:
        arguments = [*arguments, "--limit", str(limit_bytes)]
    command = [sys.executable, *_SCRIPT, *arguments]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=_environment(), text=True)
        look = threading.Thread(target=_look, args=(child, run), daemon=True)
        look.start()
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith(TOLD):
                    _note(run, json.loads(line.removeprefix(TOLD)), watch)
            run.code = child.wait()
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
            look.join()
        errors.seek(0)
        run.errors = errors.read()
    return run


def _environment() -> dict[str, str]:
    home = str(Path(gradstow.__file__).parents[1])
    paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **MALLOC, "PYTHONPATH": os.pathsep.join(paths)}


def _note(run: Run, data: dict[str, Any], watch: Watch) -> None:
    kind = data["kind"]
    run.told[kind] = data
    if kind == "step":
        run.losses.append(data["loss"])
        run.bits.append(data["bits"])
        run.seconds.append(data["seconds"])
    elif kind == "trained":
        run.training_bytes = run.highest_bytes
    watch(data)


def _look(child: subprocess.Popen[str], run: Run) -> None:
    """Follow the child's private memory; it cannot be asked for its highest afterwards."""
    stop = threading.Event()
    while child.poll() is None:
        run.highest_bytes = max(run.highest_bytes, data_bytes(child.pid) or 0)
        stop.wait(_INTERVAL)
