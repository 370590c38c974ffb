"""The zoo's table on disk: one row per model, the newest one, in the order of the zoo."""

from __future__ import annotations

import csv
import importlib.metadata
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from _rows import RESULTS, VERSIONS, versions
from zoo._attempt import GOOD, LIBRARIES, SILENT

TABLE = RESULTS / "zoo.csv"
FIELDS = (
    "model",
    "outcome",
    "budget",
    "equal",
    "within",
    "compared",
    "plain_mib",
    "budget_mib",
    "measured_mib",
    "predicted_to_measured",
    "measured_to_plain",
    "time_ratio",
    "rerun_ops",
    "regions",
    "breaks",
    "recorded",
    "costs",
    "seconds",
    "note",
    *LIBRARIES,
    *VERSIONS,
)
_SAME = ("torch", "gradstow", "python", *LIBRARIES)  # a row with these is not tried again by --resume
_UNTRIED = ("not built",)  # nothing about gradstow


def read(path: Path) -> dict[str, dict[str, str]]:
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {row["model"]: row for row in csv.DictReader(file)}


def write(path: Path, rows: Mapping[str, Mapping[str, Any]], order: Iterable[str]) -> None:
    """All rows, whole or not at all; models that the zoo no longer has leave."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(_shown(rows[name]) for name in order if name in rows)
    os.replace(temporary, path)


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()}


def of_now(threads: int) -> dict[str, str]:
    """The versions that rows made now carry."""
    libraries = {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {key: str(value) for key, value in (versions() | libraries | {"threads": threads}).items()}


def current(row: Mapping[str, str], now: Mapping[str, str]) -> bool:
    return all(row.get(key) == now[key] for key in _SAME)


def silent(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Models with other numbers than plain PyTorch's, or over their budget."""
    return [str(row["model"]) for row in rows if row["outcome"] in SILENT]


def summary(rows: list[Mapping[str, Any]]) -> str:
    """Counts, and a line for every model that is not planned, equal and within its budget."""
    tried = [row for row in rows if row["outcome"] not in _UNTRIED]
    counts = Counter(str(row["outcome"]) for row in rows)
    good = counts[GOOD]
    lines = [
        f"{len(rows)} models: {', '.join(f'{count} {name}' for name, count in counts.most_common())}",
        f"planned, equal and within the budget: {good} of {len(tried)} tried ({100 * good / max(len(tried), 1):.1f} %)",
        f"at the smallest budget instead of the asked one: {sum(row['budget'] == 'minimum' for row in tried)}; "
        f"first step recorded: {sum(int(row.get('recorded') or 0) > 0 for row in tried)}",
    ]
    lines += [f"{row['outcome']:<14} {row['model']}: {row['note']}" for row in rows if row["outcome"] != GOOD]
    return "\n".join(lines)
