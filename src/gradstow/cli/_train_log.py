"""The log of a training run: one row per step, as CSV or as JSON lines."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradstow.cli._input import InputError, check_writable

FIELDS = (
    "step", "epoch", "loss", "grad_norm", "clip_at", "skipped", "micro_batches", "peak_bytes", "seconds",
    "samples_per_second", "lr",
)  # fmt: skip


class TrainLog:
    """Appends rows to a file that ends in .csv, .jsonl or .ndjson; every row is written at once."""

    def __init__(self, path: Path) -> None:
        if path.suffix not in (".csv", ".jsonl", ".ndjson"):
            raise InputError(f"the log {path} is neither .csv nor .jsonl. Give a name with one of these endings.")
        check_writable(path, "the log")
        self._path, self._csv = path, path.suffix == ".csv"

    def start(self, done: int) -> None:
        """Keep the rows of the first ``done`` steps: a run that was killed may have written more than it saved."""
        kept = [row for row in self._rows() if int(row["step"]) <= done] if done and self._path.exists() else []
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.part")
        text = (self._line(dict(zip(FIELDS, FIELDS, strict=True))) if self._csv else "") + "".join(
            map(self._line, kept)
        )
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, self._path)

    def write(self, row: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8", newline="") as file:
            file.write(self._line(row))

    def _rows(self) -> list[dict[str, Any]]:
        text = self._path.read_text(encoding="utf-8")
        lines = text[: text.rfind("\n") + 1].splitlines()  # a row that was cut off while it was written is left out
        try:
            return list(csv.DictReader(lines)) if self._csv else [json.loads(line) for line in lines]
        except (ValueError, KeyError) as error:
            raise InputError(f"the log {self._path} cannot be continued: {error}. Name another with --log.") from error

    def _line(self, row: Mapping[str, Any]) -> str:
        if not self._csv:
            return json.dumps({name: row.get(name) for name in FIELDS}) + "\n"
        text = io.StringIO()
        csv.DictWriter(text, FIELDS, extrasaction="ignore", lineterminator="\n").writerow(dict(row))
        return text.getvalue()
