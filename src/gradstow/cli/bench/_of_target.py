"""The strategies on a target: each is verified against plain PyTorch, bit for bit."""

from __future__ import annotations

from typing import Any

import gradstow as gs
from gradstow._errors import BudgetTooSmall
from gradstow._units import format_bytes
from gradstow.cli._output import Meter
from gradstow.cli._targets import build_target
from gradstow.cli._train_digits import accuracy_under
from gradstow.cli.bench._table import ACCURACY, INTERVAL, RATIO, SAVED, STEP_PEAK, Column, Row, Table, refusal, yes

COLUMNS = (
    Column("strategy", "strategy"), SAVED, STEP_PEAK, Column("plain_step_peak_bytes"), RATIO, INTERVAL,
    Column("rerun_ops", "reruns"), Column("equal", "equal", yes), ACCURACY,
)  # fmt: skip
_POLICIES = ("store-all", "recompute-all", "sqrt", "selective")


def of_target(
    target: str,
    batch: int | None,
    budgets: list[str],
    rounds: int,
    train: bool,
    seq: int,
    attn: str | None,
    image: int | None,
) -> tuple[Table, bool]:
    """The table, and whether everything was equal to plain PyTorch, the accuracy of a small network included."""
    made = build_target(target, batch, seq=seq, attn=attn, image=image)
    asked: list[dict[str, Any]] = [{"policy": name} for name in _POLICIES]
    asked += [{"budget": text} for text in budgets]
    rows = []
    with Meter() as meter:
        for number, options in enumerate(asked):
            name = options.get("policy") or f"planned, {options['budget']}"
            meter(f"strategy {name}", number, len(asked))
            rows.append({"strategy": name, **_row(made, options, rounds, train)})
        accuracy = accuracy_under() if train else None
    settings = {"target": made.name} | ({} if batch is None else {"batch": batch})
    table = Table("strategies", f"{made.name}: strategies, measured", COLUMNS, settings, rows)
    peaks = [row["plain_step_peak_bytes"] for row in rows if "plain_step_peak_bytes" in row]
    table.notes = [f"plain PyTorch: step peak {format_bytes(peak)}" for peak in peaks[:1]]
    if accuracy is not None:
        table.settings = {**settings, "plain_accuracy": accuracy}
        table.notes.append(
            f"accuracy: a small network on MNIST digits, two epochs; plain PyTorch {100 * accuracy:.1f} %"
        )
    return table, all(row.get("equal", True) and row.get("accuracy", accuracy) == accuracy for row in rows)


def _row(made: Any, options: dict[str, Any], rounds: int, train: bool) -> Row:
    try:
        proof = gs.verify(made.model, made.batch, loss=made.loss, steps=2, rounds=rounds, **options)
    except BudgetTooSmall as error:
        return {"refused": refusal(error)}
    return {
        "saved_bytes": proof.plan.saved_bytes,
        "step_peak_bytes": proof.measured_peak_bytes,
        "plain_step_peak_bytes": proof.plain_peak_bytes,
        "time_ratio": proof.time_ratio,
        "time_ratio_interval": list(proof.time_ratio_interval),
        "rerun_ops": proof.rerun_ops,
        "equal": proof.equal and not proof.inconclusive,
        **({"accuracy": accuracy_under(**options)} if train else {}),
    }
