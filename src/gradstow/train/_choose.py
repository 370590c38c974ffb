"""The micro-batch and the plan that together give the highest predicted throughput inside a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gradstow._errors import BudgetTooSmall, CaptureError
from gradstow._plan import Plan
from gradstow._units import Budget, format_bytes
from gradstow._wanted import ACTIONS, LossyLike, PolicyLike, Progress, Wanted
from gradstow.capture import RehearsalFailed
from gradstow.train._given import samples_of
from gradstow.train._grown import Samples
from gradstow.train._precision import Precision
from gradstow.train._sized import Forward, Loss, Optimizers, SizedStep, absolute
from gradstow.train._window import size_of

_FINALISTS = 3  # sizes that are planned with a solver
_ALIKE = 0.01  # relative throughput under which the larger micro-batch is taken
_SLOWER = 2  # halvings in a row that are not faster, after which none is tried
_AROUND_OP = 10e-6  # seconds of Python and autograd around an op, which timing it alone leaves out
_HOPELESS = 1.3  # sizes predicted to need more than this times the budget are not rehearsed


@dataclass(frozen=True)
class Alternative:
    """One micro-batch size that was looked at.

    Attributes:
        micro_batch, micro_batches: samples of each, and how many make a window.
        peak_bytes: predicted peak of all live bytes; where refused, the smallest that was found for it.
        samples_per_second: predicted for forward and backward, 10 µs around each op included, so that many small
            micro-batches are not taken for free; 0.0 where refused.
        stores_all: everything is stored, so nothing is computed or packed for lack of memory.
        solved: planned with the solver; else the figures are those of a quick plan.
        refused: why it cannot be taken, or "".
    """

    micro_batch: int
    micro_batches: int
    peak_bytes: int
    samples_per_second: float
    stores_all: bool = False
    solved: bool = False
    refused: str = ""

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class Choice:
    """A micro-batch size with its plan, and what else was looked at; print it.

    Attributes:
        plan: of the micro-batch that sets the peak: where there are several, one whose gradients are added up.
        plans: all that a window needs: ``plan``, then the first micro-batch's (no ``.grad`` yet) and the short last
            one's where they differ. All keep to the same budget in bytes.
        whole_because: why the batch was not to be split, or "".
    """

    batch_size: int
    micro_batch: int
    plan: Plan
    plans: tuple[Plan, ...]
    alternatives: tuple[Alternative, ...]
    budget_bytes: int | None = None
    whole_because: str = ""

    @property
    def micro_batches(self) -> int:
        return -(-self.batch_size // self.micro_batch)

    @property
    def chosen(self) -> Alternative:
        return next(a for a in self.alternatives if a.micro_batch == self.micro_batch)

    def to_json(self) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size,
            "micro_batch": self.micro_batch,
            "micro_batches": self.micro_batches,
            "budget_bytes": self.budget_bytes,
            "predicted_peak_bytes": self.plan.predicted_peak_bytes,
            "whole_because": self.whole_because,
            "alternatives": [a.to_json() for a in self.alternatives],
        }

    def __str__(self) -> str:
        limit = "no limit" if self.budget_bytes is None else format_bytes(self.budget_bytes)
        lines = [
            f"micro-batch {self.micro_batch} of {self.batch_size} samples ({self.micro_batches} in a window), "
            f"budget {limit}" + (f"; not split: {self.whole_because}" if self.whole_because else ""),
            f"{'micro-batch':>13} {'count':>6} {'peak':>11} {'samples/s':>10}  note",
        ]
        lines += [_line(a, a.micro_batch == self.micro_batch) for a in self.alternatives]
        lines.append("samples/s are predicted for forward and backward; optimizer.step comes on top, once a window")
        return "\n".join(lines)


def _line(a: Alternative, chosen: bool) -> str:
    speed = "-" if a.refused else f"{a.samples_per_second:.4g}"
    note = a.refused or (
        "stores everything" if a.stores_all else "planned" if a.solved else "planned, without the solver"
    )
    mark = "*" if chosen else " "
    return f"{mark}{a.micro_batch:>12} {a.micro_batches:>6} {format_bytes(a.peak_bytes):>11} {speed:>10}  {note}"


def choose(
    model: torch.nn.Module,
    example_batch: Any,
    *,
    loss: Loss | None = None,
    optimizer: Optimizers = None,
    budget: int | str | Budget | None = None,
    batch_size: int | None = None,
    precision: str | Precision = "fp32",
    coupled: Sequence[str] | str = (),
    forward: Forward | None = None,
    keep_output: bool = False,
    policy: PolicyLike = "auto",
    actions: Sequence[str] = ACTIONS,
    lossy: LossyLike = None,
    offload: str | None = None,
    progress: Progress | None = None,
) -> Choice:
    """Choose micro-batch and plan for a window of ``batch_size`` samples, on fake tensors only.

    Args:
        example_batch: a batch with any number of samples; it is neither run nor copied.
        loss: ``loss(output, batch)``, a scalar or a pair (mean, count).
        optimizer: one or several; their state and step count.
        budget: all live bytes, as for ``gs.stow``. A percentage is of plain PyTorch's step peak for the whole batch.
        batch_size: samples of the window; None takes the example's.
        coupled: names of modules that couple the samples of a batch: then only the whole batch is considered.
        keep_output: whether the loop holds the model's output while the backward runs.
        policy, actions, lossy, offload, progress: as for ``gs.plan``.

    Memory: one op at a time, for timing. The whole batch counts as resident in every alternative.

    Raises:
        BudgetTooSmall: not even single samples fit (or the whole batch, where it must not be split).
        BudgetError, CaptureError, PolicyError.
    """
    size = size_of(example_batch) if batch_size is None else samples_of("batch_size", batch_size)
    wanted = Wanted.of(budget, policy, actions, lossy, offload, progress=progress)
    step = SizedStep(
        model, Samples(example_batch), loss, optimizer, forward, Precision.of(precision), keep_output, wanted
    )
    names = [coupled] if isinstance(coupled, str) and coupled else list(coupled)
    why = f"{', '.join(names[:3])} couple{'s' if len(names) == 1 else ''} the samples of a batch" if names else ""
    try:
        if wanted.budget is not None:
            step.wanted = wanted.limited(absolute(wanted.budget, step, size))
        return _Search(step, size, why).choice()
    except RehearsalFailed as error:
        raise CaptureError(
            f"the micro-batch cannot be chosen: {error} Or give micro_batch= as a number, or None for the whole batch."
        ) from error


@dataclass
class _Search:
    """Quick plans for a few sizes, the solver for the best of them."""

    step: SizedStep
    size: int
    why: str
    found: dict[int, Alternative] = field(default_factory=dict)
    plans: dict[int, Plan] = field(default_factory=dict)
    errors: dict[int, BudgetTooSmall] = field(default_factory=dict)

    def choice(self) -> Choice:
        self.step.batch_bytes = self.step.bytes_of(self.size)
        self._halve()
        self._fill()
        if not self.plans:
            self._last_try()
        best = self._best()
        budget = self.step.wanted.budget
        return Choice(
            batch_size=self.size,
            micro_batch=best,
            plan=self.plans[best],
            plans=(self.plans[best], *self._others(best)),
            alternatives=tuple(self.found[m] for m in sorted(self.found, reverse=True)),
            budget_bytes=None if budget is None else budget.total_bytes,
            whole_because=self.why,
        )

    def _halve(self) -> None:
        """The whole batch, its half, ... until everything can be stored and smaller ones are not faster."""
        count, fastest, slower = 1, 0.0, 0
        while True:
            micro = -(-self.size // count)
            self._try(micro, "quick")
            tried = self.found[micro]
            if micro == 1 or self.why or self.step.wanted.budget is None:
                return
            if not tried.refused:
                slower = slower + 1 if tried.samples_per_second <= fastest else 0
                fastest = max(fastest, tried.samples_per_second)
                if slower and (tried.stores_all or slower == _SLOWER):
                    return
            count = self._next_count(count, tried)

    def _next_count(self, count: int, tried: Alternative) -> int:
        """Twice as many micro-batches, or more where the peak says that this is hopeless."""
        budget = self.step.wanted.budget
        if not tried.refused or budget is None or budget.total_bytes is None:
            return count * 2
        fixed = self.errors[tried.micro_batch].minimum_bytes - self._growing(tried)
        room = _HOPELESS * (budget.total_bytes - fixed)
        if room <= 0:
            return max(count * 2, self.size)
        fits = int(room / max(1, self._growing(tried)) * tried.micro_batch)
        while -(-self.size // (count * 2)) > max(1, fits):
            count *= 2
        return count * 2

    def _growing(self, tried: Alternative) -> int:
        """The part of a refused size's peak that grows with the micro-batch: all that is not resident."""
        resident = self.step.captured(tried.micro_batch).common.resident
        kept = resident.total - resident.batch + self.step.batch_bytes
        return max(1, self.errors[tried.micro_batch].minimum_bytes - kept)

    def _fill(self) -> None:
        """The largest size that stores everything lies between two halves: try it, and the next larger one."""
        budget = self.step.wanted.budget
        if budget is None or budget.total_bytes is None or self.why:
            return
        stored = sorted(m for m, a in self.found.items() if a.stores_all)
        if not stored or stored[-1] == self.size:
            return
        low = stored[-1]
        peaks = {m: plan.plain_peak_bytes for m, plan in self.plans.items()}
        other = min((m for m in peaks if m > low), default=min(m for m in peaks))
        if other == low:
            return
        slope = (peaks[other] - peaks[low]) / (other - low)
        most = min(self.size, low + int((budget.total_bytes - peaks[low]) / max(slope, 1.0)))
        count = -(-self.size // max(low, most))
        for k in (count, count - 1):
            if k >= 1:
                self._try(-(-self.size // k), "quick")

    def _last_try(self) -> None:
        """Nothing fits by quick plans: the solver may still find a schedule for the smallest, or for the next one: some
        processors' convolutions need more memory for one sample than for two."""
        smallest = min(self.found)
        sizes = [m for m in (smallest, smallest + 1) if m == smallest or (m <= self.size and not self.why)]
        for micro in sizes:
            self._try(micro, "normal")
            if micro in self.plans:
                return
        error = self.errors[smallest]
        least = min(self.step.smallest_bytes(m, self.errors[m], adds=m < self.size) for m in sizes)
        what = f"the whole batch of {self.size}" if self.why else "a single sample at a time"
        fix = f"It is not split, because {self.why}. " if self.why else ""
        raise BudgetTooSmall(
            f"not even {what} fits the budget of {format_bytes(error.budget_bytes)}. {fix}The smallest budget is "
            f"{least} bytes ({format_bytes(least)}). Give at least that, or use a smaller "
            f"model{' or batch' if self.why else ''}.",
            budget_bytes=error.budget_bytes,
            minimum_bytes=least,
        ) from error

    def _best(self) -> int:
        ranked = sorted(self.plans, key=lambda m: (-self.found[m].samples_per_second, -m))
        for micro in ranked[:_FINALISTS]:
            self._try(micro, "normal")
        solved = [m for m in self.plans if self.found[m].solved]
        fastest = max(self.found[m].samples_per_second for m in solved)
        return max(m for m in solved if self.found[m].samples_per_second >= (1 - _ALIKE) * fastest)

    def _try(self, micro: int, effort: str) -> None:
        known = self.found.get(micro)
        if known is not None and (effort == "quick" or known.solved):
            return
        count = -(-self.size // micro)
        try:
            plan = self.step.plan(micro, effort, adds=count > 1)
        except BudgetTooSmall as error:
            if known is not None and not known.refused:  # the quick plan stands
                self.found[micro] = replace(known, solved=True)
                return
            self.errors[micro] = error
            refused = f"needs at least {format_bytes(error.minimum_bytes)}"
            self.found[micro] = Alternative(micro, count, error.minimum_bytes, 0.0, refused=refused)
            return
        if micro in self.plans and self.plans[micro].predicted_seconds < plan.predicted_seconds:
            plan = self.plans[micro]
        self.plans[micro] = plan
        all_ = plan.solver.get("solver") == "store-all"
        seconds = plan.predicted_seconds + _AROUND_OP * len(plan.timeline.moments)
        speed, solved = micro / seconds, all_ or effort != "quick"
        self.found[micro] = Alternative(micro, count, plan.predicted_peak_bytes, speed, all_, solved)

    def _others(self, micro: int) -> list[Plan]:
        """Plans for the first micro-batch of a window and for the short last one."""
        count = -(-self.size // micro)
        if count == 1:
            return []
        effort = "quick" if self.found[micro].stores_all else "normal"
        found = [self.step.plan(micro, effort)]
        last = self.size - (count - 1) * micro
        if last != micro:
            found.append(self.step.plan(last, effort, adds=True))
        return found


__all__ = ["Alternative", "Choice", "choose"]
