"""Rows of results: appended to a CSV as they are found, and shown."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradstow.cli._versions import VERSIONS, versions

RESULTS = Path(__file__).parent / "results"


def parse(doc: str | None, models: Sequence[str], out: str, **numbers: int) -> argparse.ArgumentParser:
    """What the benchmarks over models take: ``--models``, ``--device``, ``--out``, and options with a number."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=models, choices=models)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS / out)
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser


def write(path: Path, fields: Sequence[str], row: Mapping[str, Any]) -> None:
    """Append the row; floats with four digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fields)
        if new:
            writer.writeheader()
        writer.writerow(shown)
    print(" ".join(f"{k}={v}" for k, v in shown.items() if v is not None), file=sys.stderr, flush=True)


__all__ = ["RESULTS", "VERSIONS", "parse", "versions", "write"]
