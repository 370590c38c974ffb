"""The strategies on a target: each is verified against plain PyTorch, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gradstow as gs
from gradstow._errors import BudgetTooSmall
from gradstow._units import format_bytes
from gradstow.cli._output import Emit, Meter
from gradstow.cli._targets import Target, build_target
from gradstow.cli._train_digits import accuracy_under
from gradstow.cli.bench import _columns as column
from gradstow.cli.bench._refused import Row, rows_of
from gradstow.cli.bench._table import Table

COLUMNS = (
    column.STRATEGY, column.SAVED, column.STEP_PEAK, column.Column("plain_step_peak_bytes"), column.RATIO,
    column.INTERVAL, column.Column("rerun_ops", "reruns"), column.Column("equal", "equal", column.yes), column.ACCURACY,
)  # fmt: skip
_PLAIN = "plain PyTorch: step peak"
_POLICIES = ("store-all", "recompute-all", "sqrt", "selective")


@dataclass(frozen=True)
class _Strategy:
    """``options`` of ``gs.verify``; ``at_least`` as in ``Way``."""

    name: str
    options: dict[str, Any]
    at_least: Callable[[int], _Strategy] | None = None


def _smallest(budget: int) -> _Strategy:
    return _Strategy("planned, smallest", {"budget": budget})


def of_target(
    target: str,
    batch: int | None,
    budgets: list[str],
    rounds: int,
    train: bool,
    seq: int,
    attn: str | None,
    image: int | None,
    out: Path | None,
    emit: Emit,
) -> int:
    """Measure the table. 0 where everything was equal to plain PyTorch, the accuracy of a small network included."""
    made = build_target(target, batch, seq=seq, attn=attn, image=image)
    asked = [_Strategy(name, {"policy": name}) for name in _POLICIES]
    asked += [_Strategy(f"planned, {text}", {"budget": text}, _smallest) for text in budgets]
    given = {"batch": batch, "seq": seq, "attn": attn, "image": image}
    settings = {"target": target, **{name: value for name, value in given.items() if value is not None}}
    table = Table("strategies", f"{target}: strategies, measured", COLUMNS, settings, out)
    table.measure(partial(_rows, table, made, asked, rounds, train), emit)
    plain = table.found.get("plain_accuracy")
    return 0 if all(row.get("equal", True) and row.get("accuracy", plain) == plain for row in table.rows) else 1


def _rows(table: Table, made: Target, asked: list[_Strategy], rounds: int, train: bool, meter: Meter) -> Iterator[Row]:
    """The rows; what they are compared with goes into the table, too."""
    if train:
        meter("plain PyTorch's accuracy", 0, len(asked))
        plain = accuracy_under()
        table.found = {"plain_accuracy": plain}
        table.notes = [f"accuracy: a small network on MNIST digits, two epochs; plain PyTorch {100 * plain:.1f} %"]

    def measure(strategy: _Strategy, done: int, total: int) -> Row:
        meter(f"strategy {strategy.name}", done, total)
        row = _row(made, strategy.options, rounds)
        return row | (_accuracy(strategy) if train else {})

    for row in rows_of(asked, measure):
        told = table.notes and table.notes[0].startswith(_PLAIN)
        if not told and "plain_step_peak_bytes" in row:
            table.notes.insert(0, f"{_PLAIN} {format_bytes(row['plain_step_peak_bytes'])}")
        yield {"strategy": row.pop("way"), **row}


def _row(made: Target, options: dict[str, Any], rounds: int) -> Row:
    proof = gs.verify(made.model, made.batch, loss=made.loss, steps=2, rounds=rounds, **options)
    return {
        "saved_bytes": proof.plan.saved_bytes,
        "step_peak_bytes": proof.measured_peak_bytes,
        "plain_step_peak_bytes": proof.plain_peak_bytes,
        "time_ratio": proof.time_ratio,
        "time_ratio_interval": list(proof.time_ratio_interval),
        "rerun_ops": proof.rerun_ops,
        "equal": proof.equal and not proof.inconclusive,
    }


def _accuracy(strategy: _Strategy) -> Row:
    """Of the small network; none under bytes that are the target's, or a budget that is too small for this network."""
    if isinstance(strategy.options.get("budget"), int):
        return {}
    try:
        return {"accuracy": accuracy_under(**strategy.options)}
    except BudgetTooSmall:
        return {}
