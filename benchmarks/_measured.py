"""One plan against plain PyTorch: peak, time, equality."""

from __future__ import annotations

import statistics
from typing import Any

import gradstow as gs
from _cases import Case
from gradstow._api import make_step
from gradstow._planning import capture_step
from gradstow._stow import stow_model
from gradstow._verify import Proof, compare, median_interval, step_peak, time_ratios
from gradstow._wanted import Wanted
from gradstow.capture import Captured, same_randomness
from gradstow.cli._targets import build_target

MIB = 1 << 20


def begun(case: Case, device: str) -> tuple[Captured, Proof, float]:
    """The captured step of a model of the table, plain PyTorch's numbers for one step, and its step peak in MiB."""
    target = build_target(case.target, case.batch, attn=case.attn, seq=case.seq)
    step = make_step(target.model, target.batch, target.loss, None, None, keep_output=False)
    captured = capture_step(target.model, step, Wanted())
    proof = Proof(target.model, target.batch, step.call, step.loss, None, steps=1)
    return captured, proof, step_peak(proof.plain, device) / MIB


def measured(proof: Proof, plan: gs.Plan, rounds: int, device: str) -> dict[str, Any]:
    """Columns of a row: a step is compared bit for bit, then measured, then timed in turn with a plain one."""
    twin = proof.trainee()
    stow_model(twin.model, Wanted(), plan)
    with same_randomness():
        got = twin.train(1, lambda _n: None)
        peak = step_peak(twin, device)
        ratios = time_ratios(proof.plain, twin, rounds, lambda _n: None)
    low, high = median_interval(ratios)
    return {
        "predicted_peak_mib": plan.predicted_step_peak_bytes / MIB,
        "peak_mib": peak / MIB,
        "predicted_ratio": plan.predicted_seconds / plan.plain_seconds,
        "ratio": statistics.median(ratios),
        "ratio_low": low,
        "ratio_high": high,
        "rerun_ops": plan.rerun_ops,
        "compressed": sum(row.decision == "compress" for row in plan.rows),
        "equal": not compare(proof.expected, got),
        "rounds": rounds,
    }
