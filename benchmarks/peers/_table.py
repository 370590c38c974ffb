"""The rows on disk: one per model, system and setting, the newest one, in the order in which they are measured."""

from __future__ import annotations

import csv
import importlib.metadata
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from _rows import RESULTS, VERSIONS, versions
from peers._models import MODELS
from peers._settings import COMPILE, ORDER, Job

TABLE = RESULTS / "peers.csv"
LIBRARIES = ("torchvision", "transformers")
FIELDS = (
    "model", "batch", "kind", "peer", "setting", "outcome", "plain_peak_mib", "budget_mib", "peak_mib",
    "plain_seconds", "seconds", "ratio", "ratio_low", "ratio_high", "equal", "buffers_equal", "error", "error_ratio",
    "eager_error", "rerun_ops", "first_seconds", "whole_seconds", "rounds", "note", *LIBRARIES, *VERSIONS,
)  # fmt: skip
_BYTES = ("plain_peak_mib", "budget_mib", "peak_mib")  # exact: plans are made for them
_SAME = ("torch", "gradstow", "python", "device", *LIBRARIES)  # a row with these is not measured again by --resume
_NEARLY = 1e-3

Key = tuple[str, str, str]  # model, peer, setting
Rows = dict[Key, dict[str, Any]]


def key(row: Mapping[str, Any]) -> Key:
    return row["model"], row["peer"], row["setting"]


def read(path: Path) -> Rows:
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {key(row): row for row in csv.DictReader(file)}


def write(path: Path, rows: Rows) -> None:
    """All rows, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(_shown(row) for row in ordered(related(rows)))
    os.replace(temporary, path)


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Floats with four digits; bytes stay exact."""
    return {
        name: f"{value:.{12 if name in _BYTES else 4}g}" if isinstance(value, float) else value
        for name, value in row.items()
    }


def ordered(rows: Rows) -> list[dict[str, Any]]:
    """By model; peers in the order in which they are measured, gradstow's behind those of their kind."""
    models, systems = list(MODELS), ORDER

    def place(row: Mapping[str, Any]) -> tuple[int, bool, int, float]:
        system = (row["peer"], row["setting"])
        number = systems.index(system) if system in systems else len(systems)
        model = models.index(row["model"]) if row["model"] in models else len(models)
        return model, row["kind"] == "compiled", number, -float(row.get("budget_mib") or 0)

    return sorted(rows.values(), key=place)


def related(rows: Rows) -> Rows:
    """With each compiled row's error relative to that of torch.compile without a budget."""
    found = {}
    for place, row in rows.items():
        usual = float(rows.get((row["model"], COMPILE, ""), {}).get("error") or 0)
        ratio = float(row["error"]) / usual if usual and row.get("error") not in (None, "") else None
        found[place] = {**row, "error_ratio": ratio}
    return found


def of_now(threads: int, device: str) -> dict[str, str]:
    """The versions that rows made now carry."""
    libraries = {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {
        name: str(value)
        for name, value in (versions(device.partition(":")[0]) | libraries | {"threads": threads}).items()
    }


def is_done(job: Job, rows: Rows, now: Mapping[str, str], retry: Iterable[str] = ()) -> bool:
    """Measured with these versions, and for this budget; ``retry`` are outcomes that do not count."""
    row = rows.get((job.model, *job.key))
    if row is None or row["outcome"] in retry or any(row.get(name) != now[name] for name in _SAME):
        return False
    budget = row.get("budget_mib")
    if not job.budget or budget in (None, ""):
        return True
    return abs(float(budget) * (1 << 20) / job.budget - 1) < _NEARLY
