"""Try gradstow on torchvision's classifiers and segmentation models, one model of every timm family, and many tiny
transformers, each at 60 % of plain PyTorch's step peak (or at the smallest budget, where that is more).

    python benchmarks/zoo                           # all; hours on two cores
    python benchmarks/zoo --guess                   # without timing ops: equality and peaks, no good times
    python benchmarks/zoo --resume                  # what benchmarks/results/zoo.csv does not have yet
    python benchmarks/zoo --only resnet timm:vit    # names that contain one of these
    python benchmarks/zoo --survey                  # look again for timm's smallest variants

Each model trains three steps as plain PyTorch and three stowed, in a process of its own, and everything is compared
bit for bit. Exits with 1 where a number differs silently or a peak is over its budget.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # so that the zoo is a package, beside _rows

from zoo import _table
from zoo._attempt import GOOD, heavy, names
from zoo._workers import Limits, run_all


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the tries end with us
    options = _parse()
    if options.survey:
        return _survey()
    every = names()
    now = _table.of_now(options.threads)
    rows: dict[str, Any] = dict(_table.read(options.out))
    chosen = [name for name in every if not options.only or any(part in name for part in options.only)]
    if not chosen:
        print(f"no model's name contains any of {options.only}", file=sys.stderr)
        return 2
    todo = [n for n in chosen if not (options.resume and n in rows and _table.current(rows[n], now))]
    with tempfile.TemporaryDirectory() as cache:  # guessed times are not for others
        if options.guess:
            os.environ["GRADSTOW_CACHE_DIR"] = cache
        _run(todo, rows, every, now, options)
    print(_table.summary([rows[name] for name in chosen if name in rows]))
    return 1 if _table.silent([rows[name] for name in chosen if name in rows]) else 0


def _run(todo: list[str], rows: dict[str, Any], every: list[str], now: dict[str, str], options: Any) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task("zoo", total=len(todo))

        def done(row: dict[str, Any]) -> None:
            costs = "guessed" if options.guess else "measured"
            rows[row["model"]] = {"budget": "60%", "costs": costs, **row, **now}
            _table.write(options.out, rows, every)
            note = "" if row["outcome"] == GOOD else f": {row.get('note', '')}"
            progress.console.print(f"{row['outcome']:<13} {row['seconds']:5.0f} s  {row['model']}{note}", markup=False)
            progress.advance(bar)

        run_all(todo, heavy, options.jobs, Limits(options.timeout, options.gib, options.threads, options.guess), done)


def _survey() -> int:
    from rich.progress import Progress

    from zoo._timm import survey

    with Progress() as progress:
        bar = progress.add_task("families")
        survey(lambda done, total: progress.update(bar, completed=done, total=total))
    return 0


def _parse() -> argparse.Namespace:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="PART", help="models whose name contains one of these")
    parser.add_argument("--resume", action="store_true", help="leave out rows that are there with the same versions")
    parser.add_argument("--jobs", type=int, default=cores, help="models at a time; each gets its share of the cores")
    parser.add_argument("--guess", action="store_true", help="do not time ops: equality and peaks alone matter")
    parser.add_argument("--timeout", type=float, default=240, metavar="SECONDS", help="for one model")
    parser.add_argument("--gib", type=float, default=6, help="memory for one model")
    parser.add_argument("--out", type=Path, default=_table.TABLE)
    parser.add_argument("--survey", action="store_true", help="write zoo/timm.csv again")
    options = parser.parse_args()
    options.threads = max(1, cores // max(options.jobs, 1))
    return options


if __name__ == "__main__":
    sys.exit(main())
