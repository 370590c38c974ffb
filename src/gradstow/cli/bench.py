"""``gradstow bench``: tables of what strategies do to memory, time and accuracy, measured here and now."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gradstow._errors import BudgetTooSmall
from gradstow._units import format_bytes, parse_budget
from gradstow.cli._input import InputError
from gradstow.cli._options import AsJson, Attn, Batch, Image, Seq, Text
from gradstow.cli._output import Meter, results
from gradstow.cli._train_digits import accuracy_under

bench = typer.Typer(help="Measure strategies side by side.", no_args_is_help=True)
_POLICIES = ("store-all", "recompute-all", "sqrt", "selective")


@bench.callback()
def _group() -> None:
    """Measure strategies side by side."""


@bench.command()
def strategies(
    target: Text,
    batch: Batch = None,
    budget: Annotated[list[str] | None, typer.Option(help="Budgets of planned rows; may be given again.")] = None,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds of timing.")] = 5,
    train: Annotated[bool, typer.Option(help="Also train a small network on MNIST digits under each strategy.")] = True,
    seq: Seq = 256,
    attn: Attn = None,
    image: Image = None,
    as_json: AsJson = False,
) -> int:
    """Compare the classic strategies and plans: saved bytes, peak, time ratio, equality, accuracy on real images."""
    import gradstow as gs
    from gradstow.cli._targets import build_target

    with results(as_json) as emit:
        budgets = budget or ["75%", "60%"]
        for text in budgets:
            parse_budget(text)
        if rounds < 1:
            raise InputError(f"--rounds {rounds} times nothing. Give at least 1.")
        made = build_target(target, batch, seq=seq, attn=attn, image=image)
        asked: list[dict[str, Any]] = [{"policy": name} for name in _POLICIES]
        asked += [{"budget": text} for text in budgets]
        rows = []
        with Meter() as meter:
            for number, options in enumerate(asked):
                name = options.get("policy") or f"planned, {options['budget']}"
                meter(f"strategy {name}", number, len(asked))
                row: dict[str, Any] = {"strategy": name}
                try:
                    proof = gs.verify(made.model, made.batch, loss=made.loss, steps=2, rounds=rounds, **options)
                except BudgetTooSmall as error:
                    rows.append({**row, "refused": str(error)})
                    continue
                low, high = proof.time_ratio_interval
                row |= {
                    "saved_bytes": proof.plan.saved_bytes,
                    "step_peak_bytes": proof.measured_peak_bytes,
                    "plain_step_peak_bytes": proof.plain_peak_bytes,
                    "time_ratio": proof.time_ratio,
                    "time_ratio_interval": [low, high],
                    "rerun_ops": proof.rerun_ops,
                    "equal": proof.equal and not proof.inconclusive,
                }
                if train:
                    row["accuracy"] = accuracy_under(**options)
                rows.append(row)
            plain_accuracy = accuracy_under() if train else None
        data = {"target": made.name, "torch": _torch(), "plain_accuracy": plain_accuracy, "strategies": rows}
        emit(_text(made.name, rows, plain_accuracy), data)
    same = all(row.get("equal", True) and row.get("accuracy", plain_accuracy) == plain_accuracy for row in rows)
    return 0 if same else 1


def _torch() -> str:
    import torch

    return str(torch.__version__)


def _text(name: str, rows: list[dict[str, Any]], accuracy: float | None) -> str:
    head = f"{'strategy':<18} {'saved':>11} {'step peak':>11} {'time':>7} {'95 %':>15} {'reruns':>7} {'equal':>6}"
    lines = [f"{name}: strategies, measured", head + ("  accuracy" if accuracy is not None else "")]
    for row in rows:
        if "refused" in row:
            lines.append(f"{row['strategy']:<18} refused: {row['refused'].partition(': ')[2][:90]}...")
            continue
        low, high = row["time_ratio_interval"]
        lines.append(
            f"{row['strategy']:<18} {format_bytes(row['saved_bytes']):>11} {format_bytes(row['step_peak_bytes']):>11} "
            f"{row['time_ratio']:>7.3f} {f'{low:.3f} to {high:.3f}':>15} {row['rerun_ops']:>7} "
            f"{'yes' if row['equal'] else 'NO':>6}" + (f"  {row['accuracy']:.4f}" if "accuracy" in row else "")
        )
    if rows and "plain_step_peak_bytes" in rows[0]:
        lines.append(f"plain PyTorch: step peak {format_bytes(rows[0]['plain_step_peak_bytes'])}")
    if accuracy is not None:
        lines.append(f"accuracy: a small network on MNIST digits, two epochs; plain PyTorch {accuracy:.4f}")
    return "\n".join(lines)
