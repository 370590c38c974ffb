"""One model under one budget: the row that the zoo's table gets."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import gradstow as gs
from gradstow._verify import Proof, Trainee, Verification
from zoo import _timm, _torchvision, _transformers
from zoo._subject import NotBuilt, Subject

BUDGET = "60%"
STEPS, ROUNDS = 3, 2
GOOD, SILENT = "equal", ("different", "over budget")
_MIB = 1 << 20
LIBRARIES = {"torchvision": _torchvision, "timm": _timm, "transformers": _transformers}


def names() -> list[str]:
    return [f"{library}:{name}" for library, module in LIBRARIES.items() for name in module.names()]


def heavy(name: str) -> bool:
    """Takes so much memory that it runs alone."""
    library, _, model = name.partition(":")
    return model in LIBRARIES[library].HEAVY


def build(name: str, seed: int = 0) -> Subject:
    """The model, its batch and its loss; they depend on the seed alone.

    Raises:
        NotBuilt: whatever the library raised.
    """
    library, _, model = name.partition(":")
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return LIBRARIES[library].build(model)
    except Exception as error:
        raise NotBuilt(_line(error)) from error


@dataclass
class _Watch:
    """When steps were recorded instead of planned: the warnings that came, by what was going on."""

    caught: list[warnings.WarningMessage]
    trained: list[int] = field(default_factory=list)
    measured: int = 0

    def count(self) -> int:
        return sum("recorded as it runs" in str(w.message) for w in self.caught)

    def progress(self, stage: str, _done: int, _total: int) -> None:
        if stage == "planned":
            self.trained.append(self.count())

    def inspect(self, _trainee: Trainee) -> None:
        self.measured = self.count()

    @property
    def recorded(self) -> int:
        """How many of the training steps were recorded."""
        return self.trained[-1] if self.trained else self.count()

    @property
    def peak_recorded(self) -> bool:
        return self.measured > self.recorded

    @property
    def why(self) -> str:
        found = [str(w.message) for w in self.caught if "recorded as it runs" in str(w.message)]
        return found[-1].partition("planned from it: ")[2] if found else ""


def attempt(name: str, budget: str = BUDGET, rounds: int = ROUNDS) -> dict[str, Any]:
    """Train a plain and a stowed twin, compare them, measure both: see ``_table.FIELDS``."""
    start = time.perf_counter()
    row: dict[str, Any] = {"model": name, "budget": budget}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            row |= _tried(build(name), budget, rounds, caught)
        except NotBuilt as error:
            row |= {"outcome": "not built", "note": str(error)}
    return row | {"seconds": time.perf_counter() - start}


def _tried(subject: Subject, budget: str, rounds: int, caught: list[Any]) -> dict[str, Any]:
    proof = _plain(subject)
    watch = _Watch(caught)
    proof.say = watch.progress
    try:
        found, given = _stowed(proof, budget, rounds, watch)
    except gs.errors.GradstowError as error:
        return {"outcome": "refused", "note": f"{type(error).__name__}: {_line(error)}", "recorded": watch.count()}
    except Exception as error:
        return {"outcome": "failed", "note": f"{type(error).__name__}: {_line(error)}", "recorded": watch.count()}
    return {**_figures(found), "budget": given, "recorded": watch.recorded} | _outcome(found, watch)


def _plain(subject: Subject) -> Proof:
    try:
        return Proof(subject.model, subject.batch, _call, subject.loss, None, STEPS)
    except Exception as error:  # the plain model does not train: nothing about gradstow
        raise NotBuilt(f"plain: {type(error).__name__}: {_line(error)}") from error


def _stowed(proof: Proof, budget: str, rounds: int, watch: _Watch) -> tuple[Verification, str]:
    """The check at the budget, or at the smallest that is met where it is refused."""
    stow: Callable[[torch.nn.Module], Any] = partial(gs.stow, budget=budget)
    try:
        return proof.check_stowed(stow, rounds, watch.inspect), budget
    except gs.errors.BudgetTooSmall as error:
        smallest = error.minimum_bytes
    watch.caught.clear()
    watch.trained.clear()
    return proof.check_stowed(partial(gs.stow, budget=smallest), rounds, watch.inspect), "minimum"


def _call(model: torch.nn.Module, batch: Any) -> Any:
    return model(**batch) if isinstance(batch, dict) else model(batch[0])


def _figures(found: Verification) -> dict[str, Any]:
    assert found.budget_bytes is not None
    plan = found.plan
    return {
        "equal": "inconclusive" if found.inconclusive else "yes" if found.equal else "no",
        "within": "yes" if found.within_budget else "no",
        "compared": found.compared,
        "plain_mib": found.plain_peak_bytes / _MIB,
        "budget_mib": found.budget_bytes / _MIB,
        "measured_mib": found.measured_peak_bytes / _MIB,
        "predicted_to_measured": found.predicted_peak_bytes / max(found.measured_peak_bytes, 1),
        "measured_to_plain": found.measured_peak_bytes / max(found.plain_peak_bytes, 1),
        "time_ratio": found.time_ratio,
        "rerun_ops": found.rerun_ops,
        "regions": len(plan.graph.regions),
        "breaks": len(plan.graph.breaks),
    }


def _outcome(found: Verification, watch: _Watch) -> dict[str, str]:
    if found.inconclusive:
        return {"outcome": "inconclusive", "note": "plain PyTorch differs from itself"}
    if not found.equal:
        return {"outcome": "different", "note": f"{len(found.differences)}: {'; '.join(found.differences[:3])}"}
    if watch.peak_recorded:
        return {"outcome": "never planned", "note": f"the measured step was recorded, too: {watch.why}"}
    if not found.within_budget:
        assert found.budget_bytes is not None
        over = found.measured_peak_bytes - found.budget_bytes
        return {"outcome": "over budget", "note": f"{over} bytes over"}
    return {"outcome": GOOD, "note": watch.why}


def _line(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()[:300]


__all__ = ["GOOD", "LIBRARIES", "SILENT", "attempt", "build", "heavy", "names"]
