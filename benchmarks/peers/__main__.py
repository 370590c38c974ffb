"""gradstow against every other way to save activation memory: step peak against time, and the numbers.

    python benchmarks/peers                                 # all models; a day on two cores
    python benchmarks/peers --only tiny_gpt                 # a smoke run
    python benchmarks/peers --only resnet50 --peer checkpoint "gradstow eager"
    python benchmarks/peers --resume                        # what benchmarks/results/peers.csv does not have yet
    python benchmarks/peers --table                         # measures nothing: the table from the rows that are there
    python benchmarks/peers --device cuda

Peers: plain eager; a checkpoint per block, per second block, in sqrt(n) segments, and selective; torch_remat, where it
can be imported; the library's own switch; torch.compile, with activation budgets by two solvers, and over checkpoints.
gradstow runs at the peaks that they reach, eager at those of eager ways and inductor at those of compiled ones, and at
its smallest budget. Each row is one process: plain eager and the system in turn, their step peaks by
``gs.measure_peak``, the ratio of their median times with a 95 % interval. Model and loss are one module for all.

Loss and gradients of eager ways are compared bit for bit. Those of compiled ways are held against float64, and their
error is given relative to that of torch.compile; where the model draws random numbers, torch.compile's are compared
in a second compilation that draws eager's (its times and peaks are of its own way to draw them). Models that cast to
float32 themselves (normalisations of Llama and T5) do so in the reference, too.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # so that this is a package, beside _rows

from peers import _ahead, _models, _picture, _process, _settings, _table
from peers._settings import Job

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
_AGAIN = ("failed", "crashed", "timeout")


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the row's process ends with us
    options = _parse()
    models = _models.chosen(options.only)
    if not models:
        print(f"no model's name contains any of {options.only}: there are {', '.join(_models.MODELS)}", file=sys.stderr)
        return 2
    rows = _table.read(options.out)
    if options.table is None:
        _process.prepare()
        for model in models:
            _run(model, rows, options)
    _show([row for row in _table.ordered(_table.related(rows)) if row["model"] in models], models, options)
    return 0


def _run(model: str, rows: _table.Rows, options: argparse.Namespace) -> None:
    now = _table.of_now(options.threads, options.device)
    retry = _AGAIN if options.retry else ()
    for job in jobs(model, rows, options):
        if options.resume and _table.is_done(job, rows, now, retry):
            continue
        row = _process.run_alone(job, options.timeout, options.gib) | now
        rows[_table.key(row)] = row
        _table.write(options.out, rows)
        print(said(row), file=sys.stderr, flush=True)


def jobs(model: str, rows: _table.Rows, options: argparse.Namespace) -> Iterator[Job]:
    """Peers of a kind first, then gradstow at the peaks that ``rows`` by then has of them."""
    common = {"rounds": options.rounds, "device": options.device, "threads": options.threads}
    for kind in _settings.KINDS:
        yield from (job for job in _settings.peers_of(model, kind, **common) if wanted(job, options.peer))
        ours = _settings.ours_of(model, kind, list(rows.values()), **common)
        yield from (job for job in ours if wanted(job, options.peer))


def wanted(job: Job, parts: list[str]) -> bool:
    """Whether a part is the peer's name, or, where no peer has that name, a part of its name and setting."""
    if not parts:
        return True
    peers = {*_settings.CODEGEN, *(peer for peer, _ in _settings.ORDER)}
    named = _settings.label(*job.key) if job.peer not in _settings.CODEGEN else job.peer  # at others' names
    return any(job.peer == part if part in peers else part in named for part in parts)


def said(row: dict[str, Any]) -> str:
    head = f"{row['model']:<18} {_settings.label(row['peer'], row['setting']):<45}"
    if row["outcome"] != "measured":
        return f"{head} {row['outcome']}: {row.get('note', '')}"
    point = _ahead.Point.of(row)
    numbers = row.get("equal") or f"error {row.get('error') or float('nan'):.2g}"
    return f"{head} {point.peak:8.1f} of {float(row['plain_peak_mib']):.1f} MiB  {point.time}  {numbers}"


def _show(rows: list[dict[str, Any]], models: list[str], options: argparse.Namespace) -> None:
    for model in models:
        _picture.draw(options.pictures, model, rows)
    if options.table is None:
        print(_ahead.text(rows))
        return
    page = _ahead.markdown(rows)
    print(page)
    if options.table:
        Path(options.table).write_text(page, encoding="utf-8")


def _parse() -> argparse.Namespace:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="MODEL", help="these models, or names with these parts"
    )
    parser.add_argument("--peer", nargs="*", default=[], metavar="PART", help="systems with one of these in their name")
    parser.add_argument("--resume", action="store_true", help="leave out rows that are there with the same versions")
    parser.add_argument("--retry", action="store_true", help="with --resume: not those that failed")
    parser.add_argument("--rounds", type=int, default=7, help="timed pairs of steps")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=cores)
    parser.add_argument("--timeout", type=float, default=3600, metavar="SECONDS", help="for one row")
    parser.add_argument("--gib", type=float, default=16, help="memory for one row, on the CPU")
    parser.add_argument("--out", type=Path, default=_table.TABLE)
    parser.add_argument("--pictures", type=Path, default=PICTURES, metavar="FOLDER")
    parser.add_argument(
        "--table", nargs="?", const="", metavar="FILE", help="measure nothing; print the table as Markdown"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
