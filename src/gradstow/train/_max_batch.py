"""``gs.max_batch``: the largest batch that a budget allows, found by planning alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gradstow._errors import BudgetError, BudgetTooSmall, CaptureError
from gradstow._plan import Plan
from gradstow._units import format_bytes
from gradstow._wanted import ACTIONS, LossyLike, PolicyLike, Progress, Wanted
from gradstow.planner import Effort
from gradstow.train._given import samples_of
from gradstow.train._grown import Samples
from gradstow.train._precision import Precision
from gradstow.train._sized import Forward, Loss, Optimizers, SizedStep, absolute

LIMIT = 65536
_FIRST = (2, 4)  # sizes whose smallest peaks are extrapolated
_GUESSES = 8  # sizes that are tried before the rest is halved


@dataclass(frozen=True)
class Tried:
    """One batch size that was planned; ``peak_bytes`` is its plan's, or the smallest found where it does not fit."""

    batch_size: int
    fits: bool
    peak_bytes: int


@dataclass(frozen=True)
class MaxBatch:
    """The largest batch for a budget; ``int(result)`` is its size, ``print(result)`` shows what was tried.

    Attributes:
        batch_size: fits, as ``plan`` shows; one sample more does not, unless ``limited``.
        plan: for that batch and that budget.
        tried: every size that was planned, in ascending order.
        limited: the largest size that was asked for fits.
    """

    batch_size: int
    plan: Plan
    budget_bytes: int
    tried: tuple[Tried, ...]
    limited: bool = False

    def __int__(self) -> int:
        return self.batch_size

    def __index__(self) -> int:
        return self.batch_size

    def to_json(self) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size,
            "budget_bytes": self.budget_bytes,
            "predicted_peak_bytes": self.plan.predicted_peak_bytes,
            "predicted_seconds": self.plan.predicted_seconds,
            "rerun_ops": self.plan.rerun_ops,
            "limited": self.limited,
            "tried": [{"batch_size": t.batch_size, "fits": t.fits, "peak_bytes": t.peak_bytes} for t in self.tried],
        }

    def __str__(self) -> str:
        plan, more = self.plan, " (the limit of the search)" if self.limited else ""
        lines = [
            f"{plan.graph.model}: at most {self.batch_size} samples{more} in a budget of "
            f"{format_bytes(self.budget_bytes)}",
            f"peak {format_bytes(plan.predicted_peak_bytes)}, {plan.rerun_ops} ops rerun, "
            f"{self.batch_size / plan.predicted_seconds:.4g} samples/s predicted for forward and backward",
        ]
        lines += [
            f"{t.batch_size:>8}  {'fits' if t.fits else 'needs at least':<14}  {format_bytes(t.peak_bytes)}"
            for t in self.tried
        ]
        return "\n".join(lines)


def max_batch(
    model: torch.nn.Module,
    make_batch: Callable[[int], Any] | Any,
    *,
    loss: Loss | None = None,
    optimizer: Optimizers = None,
    budget: int | str,
    forward: Forward | None = None,
    limit: int = LIMIT,
    precision: str | Precision = "fp32",
    keep_output: bool = True,
    policy: PolicyLike = "auto",
    effort: str | Effort = "normal",
    progress: Progress | None = None,
    actions: Sequence[str] = ACTIONS,
    lossy: LossyLike = None,
    offload: str | None = None,
) -> MaxBatch:
    """Find the largest batch whose training step fits a budget, by planning it: the step is never allocated.

    The smallest peaks of two small batches are extrapolated; plans around what comes out of that show that the
    result fits and that one sample more does not.

    Args:
        make_batch: ``make_batch(n)`` makes a batch of n samples and is called on fake tensors, where
            ``torch.randn(n, ...)`` takes no memory; or a batch of any size, whose tensors of that length are taken
            for n samples along their first dimension.
        budget: all live bytes, ``"6GiB"``, or ``"auto"``, read once. A percentage means nothing here.
        limit: the largest size to try.
        precision: "fp32", "bf16" or "fp16": model and loss are planned under autocast.
        Others: as for ``gs.plan``.

    Memory: one op at a time, for timing, at most the budget and one GiB.

    Raises:
        BudgetTooSmall: a single sample does not fit.
        BudgetError, CaptureError, PolicyError.
    """
    limit = samples_of("limit", limit)
    wanted = Wanted.of(budget, policy, actions, lossy, offload, progress=progress)
    if wanted.budget is None or wanted.budget.percent is not None:
        raise BudgetError(
            f"the budget {budget!r} is a part of what each batch needs, which grows with the batch. "
            'Give bytes, such as "6GiB", or "auto".'
        )
    step = SizedStep(model, Samples(make_batch), loss, optimizer, forward, Precision.of(precision), keep_output, wanted)
    step.wanted = wanted.limited(absolute(wanted.budget, step, 1))
    return _Search(step, Effort.of(effort), limit).result()


@dataclass
class _Search:
    """Between ``low``, which fits, and ``high``, which does not."""

    step: SizedStep
    effort: Effort
    limit: int
    low: int = 0
    high: int = 0
    stride: int = 1  # doubles while guesses stay on one side
    tried: dict[int, Tried] = field(default_factory=dict)
    smallest: dict[int, int] = field(default_factory=dict)  # size → smallest peak that the planner finds for it
    plan: Plan | None = None
    refused: BudgetTooSmall | None = None  # of the smallest size that does not fit

    def result(self) -> MaxBatch:
        self.high = self.limit + 1
        self._begin()
        while self.high - self.low > 1:
            self._try(self._next())
        assert self.plan is not None
        return MaxBatch(
            batch_size=self.low,
            plan=self.plan,
            budget_bytes=self._budget,
            tried=tuple(self.tried[n] for n in sorted(self.tried)),
            limited=self.low == self.limit,
        )

    @property
    def _budget(self) -> int:
        budget = self.step.wanted.budget
        assert budget is not None
        assert budget.total_bytes is not None
        return budget.total_bytes

    def _begin(self) -> None:
        """Two small sizes with their smallest peaks, or the error of a single sample."""
        first, second = (min(n, self.limit) for n in _FIRST)
        self._try(first)
        if self.low == 0 and first > 1:
            with contextlib.suppress(CaptureError):  # BatchNorm, for one, may refuse a single sample
                self._try(1)
        if self.low == 0:
            size = min(self.smallest)
            assert self.refused is not None
            least = self.step.smallest_bytes(size, self.refused)
            raise BudgetTooSmall(
                f"not even {size} sample{'s' if size > 1 else ''} fit{'' if size > 1 else 's'} the budget of "
                f"{format_bytes(self._budget)}. The smallest budget is {least} bytes ({format_bytes(least)}). "
                "Give at least that, or use a smaller model.",
                budget_bytes=self._budget,
                minimum_bytes=least,
            ) from self.refused
        if self.high - self.low <= 1:
            return
        self._note_smallest()
        before = self._batch
        self._try(second)
        if self.low == second:
            if self._batch == before:
                raise CaptureError(
                    f"make_batch makes the same batch for {second} samples as for {first}. Make batches whose first "
                    "dimension is the number that it is called with."
                )
            self._note_smallest()

    @property
    def _batch(self) -> str:
        assert self.plan is not None
        return self.plan.graph.batch

    def _note_smallest(self) -> None:
        assert self.plan is not None
        self.smallest[self.low] = self.plan.minimum_peak_bytes

    def _try(self, size: int) -> None:
        try:
            plan = self.step.plan(size, self.effort)
        except BudgetTooSmall as error:
            self.high, self.refused = size, error
            self.smallest[size] = error.minimum_bytes
            self.tried[size] = Tried(size, False, error.minimum_bytes)
            return
        self.low, self.plan = size, plan
        self.tried[size] = Tried(size, True, plan.predicted_peak_bytes)

    def _next(self) -> int:
        """Where the line through two known peaks meets the budget, else steps that double, and halving at last."""
        low, high = self.low + 1, self.high - 1
        if len(self.tried) > _GUESSES and high <= self.limit:
            return (self.low + self.high) // 2
        near = sorted(self.smallest)[-2:]
        if self.high <= self.limit:  # the two that are nearest to the boundary, one on either side if there is one
            near = sorted(sorted(self.smallest, key=lambda n: abs(n - self.high))[:2])
        guess = high
        if len(near) == 2:
            a, b = near
            slope = (self.smallest[b] - self.smallest[a]) / (b - a)
            guess = a + int((self._budget - self.smallest[a]) // slope) if slope > 0 else high
        if low < guess < high:
            return guess
        self.stride *= 2
        if guess <= low:
            return min(low + self.stride // 2 - 1, high)
        return max(high - self.stride // 2 + 1, low) if high < self.limit else high
