"""Seconds and working memory of ops, each run alone on synthesised inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from gradstow.cost._analytic import UNKNOWN
from gradstow.cost._inputs import Sizes, Undecodable, sizes
from gradstow.cost._machine import Machine, device_name, machine_of, undisturbed
from gradstow.cost._memory import paused
from gradstow.cost._shrink import analytic, shrink
from gradstow.ir import CostTable, OpCost

# Bytes that timing one op may take: what the budget says, but within these. An op's inputs may share memory, which its
# call does not show, so that one that runs inside of a small budget may look too large for it.
_LEAST, _MOST = 1 << 26, 1 << 30


def timing_limit(budget_bytes: int | None) -> int:
    """Bytes that timing one op may take, for a step with this budget."""
    return _MOST if budget_bytes is None else max(_LEAST, min(_MOST, budget_bytes))


@dataclass(frozen=True, slots=True)
class _Trial:
    """What to run for a signature: itself, or a smaller call whose costs are scaled up."""

    run: str
    scale: float
    full: Sizes


def measure(
    signatures: Iterable[str],
    *,
    device: str,
    limit_bytes: int,
    progress: Callable[[int, int], None] | None = None,
) -> CostTable:
    """Measure each distinct op once, one at a time, on inputs made for it and freed after it.

    Args:
        device: "cpu", "cuda" or "cuda:1".
        limit_bytes: no op runs whose inputs and outputs take more; its cost is extrapolated.
        progress: called as ``progress(done, total)`` in units of work, not of ops.

    An op that cannot run alone costs ``OpCost(0.0, 0, "unknown")``. Integer inputs are zeros, so that they
    are valid indices: ops whose time depends on them are measured at their most regular. Memory that a
    library takes outside torch's allocator is not seen. Leaves the global random generators as they were;
    on CUDA resets the allocator's peak counter.

    Raises:
        GradstowError: where a torch profiler is running, or the device is not here.
    """
    machine = machine_of(device)
    unique = list(dict.fromkeys(signatures))
    with undisturbed(machine.device), paused():
        trials = {text: _trial(text, limit_bytes) for text in unique}
        costs = _run(machine, trials, progress)
    return CostTable(costs, device_name(device), torch.get_num_threads())


def fits(signature: str, limit_bytes: int) -> bool:
    """Whether ``measure`` would run this op at its full size."""
    try:
        return sizes(signature).fits(limit_bytes)
    except Undecodable:
        return False


def _trial(signature: str, limit_bytes: int) -> _Trial | None:
    try:
        full = sizes(signature)
    except Undecodable:
        return None
    if full.fits(limit_bytes):
        return _Trial(signature, 1.0, full)
    smaller = shrink(signature, full, limit_bytes)
    return _Trial("", math.inf, full) if smaller is None else _Trial(smaller.signature, smaller.scale, full)


def _run(
    machine: Machine, trials: dict[str, _Trial | None], progress: Callable[[int, int], None] | None
) -> dict[str, OpCost]:
    runnable = {text: trial for text, trial in trials.items() if trial is not None and trial.run}
    done, total = 0, len(trials) + len(runnable)

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    working = {}
    if runnable:
        bytes_found = machine.working_bytes([trial.run for trial in runnable.values()], tick)
        working = dict(zip(runnable, bytes_found, strict=True))
    costs = {}
    for text, trial in trials.items():
        costs[text] = UNKNOWN if trial is None else _cost(machine, text, trial, working.get(text))
        tick()
    return costs


def _cost(machine: Machine, signature: str, trial: _Trial, working: int | None) -> OpCost:
    seconds = None if working is None else _seconds(machine, trial.run)
    if working is not None and seconds is not None:
        if trial.scale == 1.0:
            return OpCost(seconds, working, "measured")
        return OpCost(seconds * trial.scale, math.ceil(working * trial.scale), "extrapolated")
    # A smaller call that fails says nothing about the full one; a full call that fails does.
    return UNKNOWN if trial.scale == 1.0 else analytic(signature, trial.full, machine.device)


def _seconds(machine: Machine, signature: str) -> float | None:
    try:
        return machine.seconds(signature)
    except Exception:  # an op may refuse synthesised inputs with any error; the cost is "unknown"
        return None
