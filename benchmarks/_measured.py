"""One plan against plain PyTorch: peak, time, equality."""

from __future__ import annotations

import statistics
from typing import Any

import gradstow as gs
from gradstow._stow import stow_model
from gradstow._verify import Proof, compare, median_interval, step_peak, time_ratios
from gradstow._wanted import Wanted
from gradstow.capture import same_randomness

MIB = 1 << 20


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
