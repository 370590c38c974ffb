"""``TrainStep``: one call runs everything between a batch and the changed weights."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradstow._api import Forward, default_forward
from gradstow._errors import GradstowError, warn_user
from gradstow._stow import plan_of, runs_planned
from gradstow._wanted import Progress
from gradstow.capture import device_of, find_loss
from gradstow.train._choose import Choice
from gradstow.train._clip import Clip, ClipResult
from gradstow.train._fit import Fit
from gradstow.train._given import (
    check_callable,
    check_data,
    check_model,
    check_parts,
    optimizers_of,
    schedulers_of,
)
from gradstow.train._inside import Inside, check_inside, optimize_inside
from gradstow.train._peak import Peak, peak_of
from gradstow.train._precision import Precision, as_float, make_scaler
from gradstow.train._snapshot import Snapshot, out_of_memory
from gradstow.train._state import Stateful, load_run, read_state, run_state, write_state
from gradstow.train._update import Scheduler, Update
from gradstow.train._watch import Watch
from gradstow.train._window import IgnoredLabels, Window, size_of

Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one window did.

    Attributes:
        loss: of the whole batch: the mean over all its samples, or over all items that the loss counted. A number, so
            that keeping it keeps no graph.
        grad_norm: 2-norm (or the clipping's) of all gradients together, unscaled, before clipping.
        clip_at: the largest norm that the clipping allowed; None where nothing limits.
        skipped: why no optimizer stepped, or None where they did.
        micro_batches: how many the batch was split into.
        peak_bytes: all live bytes at the worst moment. Predicted by the plan on CPU, the allocator's on CUDA, measured
            with ``measure=True``; None where none of these is there.
        seconds: of the call. On CUDA what the optimizer still computes is not waited for.
    """

    loss: float
    grad_norm: float
    clip_at: float | None
    skipped: str | None
    micro_batches: int
    peak_bytes: int | None
    seconds: float


class TrainStep:
    """Run whole training steps: forward, loss, backward, clipping, optimizers, schedulers, inside a memory budget.

    ``step(batch)`` is one window: gradients are cleared (also those that were there), the batch is split into
    micro-batches, their gradients are added up to what the whole batch gives, unscaled, clipped, and applied once. With
    one micro-batch in float32 and no clipping, weights, buffers and random streams are a plain loop's, bit
    for bit.

    Args:
        optimizer, scheduler: one or several. Schedulers are stepped once per window that was not skipped.
        loss: ``loss(output, batch)``, in float32: the mean over the micro-batch's samples, or a pair (mean, count), the
            mean over ``count`` items such as valid tokens: an int, or a tensor with one number, for which an
            accelerator is waited for. A micro-batch that counts 0 items has no weight and no gradient. None where the
            model's output is the loss or has a ``.loss``.
        budget: stows the model, as ``gs.stow``. None trains it as it is, stowed or not.
        batch_size: samples of a usual batch, for ``micro_batch="auto"``; None takes the first batch's.
        micro_batch: the most samples of one micro-batch; ``"auto"`` chooses size and plan together at the first call
            (see ``step.choice``); None never splits.
        precision: "fp32", "bf16" or "fp16": see ``gs.train.Precision``.
        clip: the largest global norm, or a clipping such as ``gs.train.AdaptiveClip()``.
        scaler: for fp16: a ``torch.amp.GradScaler``, or its settings; torch's defaults otherwise.
        forward: ``forward(model, batch)`` in place of ``gs.plan``'s rule for calling the model.
        splittable: False says that the loss compares the samples of a batch with each other (contrastive losses).
        allow_coupled: split even where a module (BatchNorm in training) or the loss couples samples: other numbers.
        retry_oom: after running out of memory try once more with micro-batches of half the size, and keep that size;
            None does so only where "auto" chose it. Never where samples are coupled.
        optimizer_in_backward: apply and free each gradient as soon as it is complete; see ``optimize_inside``.
        measure: measure the peak of each step, which costs a few microseconds per op on CPU.
        watch: warn of graphs that are kept and of memory that grows.
        data: where the data stands: a number that you count up in ``step.data``, or a loader with ``state_dict``.
        progress: called with (stage, done, total) while planning.

    What is not finite: a window with an inf or NaN in its loss or gradients is skipped, in every precision: weights,
    optimizers and schedulers stay, gradients are cleared, fp16's scale is backed off once, ``result.skipped`` says why.
    Buffers that the forward wrote (BatchNorm's statistics) stay written, as in plain PyTorch.

    Errors: whatever is raised in a window, Ctrl-C included, reaches you unchanged and leaves weights, optimizers,
    buffers and random streams as they were before it, without gradients; Python attributes that the forward changed are
    not put back. Inside ``optimizer.step`` that holds where nothing had been written (its state did not fit); else the
    error has a note. Ctrl-C inside ``optimizer.step`` comes just after it: then the step counts.
    A buffer of more than a mebibyte is put back only where its version counter tells that forwards write it, from the
    second time on; the first time the error has a note. A forward that writes such a buffer through ``.data`` alone
    moves no counter: neither is it put back then, nor is there a note.

    Memory: beside the budget a copy of small buffers and of those that the forward writes. Never a copy of weights.

    Raises:
        GradstowError: what contradicts itself; a batch that would have to be split and cannot be.
        BudgetError, BudgetTooSmall, CaptureError: as ``gs.stow``, at the first call.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        loss: Loss | None = None,
        budget: int | str | None = None,
        batch_size: int | None = None,
        micro_batch: int | str | None = None,
        precision: str | Precision = "fp32",
        clip: float | Clip | None = None,
        scheduler: Scheduler | Sequence[Scheduler] | None = None,
        scaler: torch.amp.GradScaler | Mapping[str, Any] | None = None,
        forward: Forward | None = None,
        splittable: bool = True,
        allow_coupled: bool = False,
        retry_oom: bool | None = None,
        optimizer_in_backward: bool = False,
        measure: bool = False,
        watch: bool = True,
        data: int | Stateful = 0,
        progress: Progress | None = None,
    ) -> None:
        check_model(model)
        check_callable(loss=loss, forward=forward, progress=progress)
        check_data(data)
        self.model, self.loss, self.data, self.measure = model, loss, data, measure
        self.optimizers, self.schedulers = optimizers_of(optimizer), schedulers_of(scheduler)
        self.precision = Precision.of(precision)
        self._device, self._forward = device_of(model), forward
        self.scaler = make_scaler(self.precision, self._device, scaler)
        self.clip = Clip.of(clip)
        self.retry_oom = micro_batch == "auto" if retry_oom is None else retry_oom
        self._inside: Inside | None = None
        if optimizer_in_backward:
            check_inside(self.clip, scaling=self.scaler is not None, retry=bool(retry_oom))
            self.retry_oom = False
            self._inside = optimize_inside(model, self.optimizers, self.clip)
        self._update = Update(self.optimizers, self.schedulers, self.scaler, self.clip)
        self._fit = Fit(
            model,
            self.optimizers,
            budget,
            micro_batch,
            batch_size,
            splittable=splittable,
            allow_coupled=allow_coupled,
            progress=progress,
        )
        own = set(self._own())
        self._others = [p for p in model.parameters() if p not in own]
        self._snapshot, self._labels = Snapshot(model), IgnoredLabels()
        self._watch = Watch(model) if watch else None

    @property
    def steps(self) -> int:
        """Windows whose step was applied."""
        return self._update.steps

    @property
    def skipped_steps(self) -> int:
        """Windows that were skipped."""
        return self._update.skipped

    @property
    def micro_batch(self) -> int | None:
        """The most samples of one micro-batch; None where batches are not split, or before "auto" has chosen."""
        return self._fit.micro_batch

    @property
    def choice(self) -> Choice | None:
        """How "auto" chose, with its alternatives: print it. None before the first call."""
        return self._fit.choice

    def __call__(self, batch: Any) -> StepResult:
        """Train on one batch, split as needed."""
        self._check_modes()
        self._fit.ready(batch, self.loss, self.precision, self._forward)
        return self._run([batch], split=True)

    def window(self, micro_batches: Sequence[Any]) -> StepResult:
        """Train on one batch that you have split yourself: one backward for each part, one step for all.

        Parts may have any sizes, and are weighted by them, or by what the loss counts. They are split further only
        after running out of memory, where that is allowed.
        """
        self._check_modes()
        check_parts(micro_batches)
        largest = max(micro_batches, key=size_of) if len(micro_batches) > 1 else micro_batches[0]
        self._fit.ready(largest, self.loss, self.precision, self._forward)
        return self._run(list(micro_batches), split=False)

    def _run(self, batches: list[Any], split: bool) -> StepResult:
        started = time.perf_counter()
        for may_retry in (self.retry_oom, False):
            parts, samples = self._parts(batches, split)
            try:
                return self._attempt(parts, samples, started)
            except Exception as error:
                if not (may_retry and out_of_memory(error) and self._smaller(batches, samples)):
                    raise
                why = str(error).splitlines()[0] if str(error) else type(error).__name__
            # Only here, where the error is gone, are the tensors of its frames, too.
            self._free(why)
            split = True
        raise AssertionError("the second attempt returns or raises")

    def _parts(self, batches: list[Any], split: bool) -> tuple[list[Any], list[int]]:
        if not split:
            return batches, [size_of(b) for b in batches] if len(batches) > 1 else [1]
        found = [self._fit.parts(batch) for batch in batches]
        if len(batches) > 1:
            sizes = [size_of(part) for parts, _ in found for part in parts]
            return [part for parts, _ in found for part in parts], sizes
        return found[0]

    def _attempt(self, parts: list[Any], samples: list[int], started: float) -> StepResult:
        """One window, or everything as before."""
        self._snapshot.save()
        self._update.begin()
        try:
            self._clear()
            window = Window(samples, self.scaler, dict.fromkeys([*self._own(), *self._others]))
            with peak_of(self.model, parts, self.optimizers, self.measure) as peak:
                loss, clipped, why = self._window(window, parts, peak)
            if why is not None:
                self._clear()
            norm = float(clipped.norm if clipped.value is None else clipped.value)
            seconds = time.perf_counter() - started
            return StepResult(loss, norm, clipped.limit, why, len(parts), peak.bytes, seconds)
        except BaseException as error:
            self._undo(error)
            raise

    def _window(self, window: Window, parts: list[Any], peak: Peak) -> tuple[float, ClipResult, str | None]:
        if self._watch is not None:
            self._watch.begin_step()
        if self._inside is not None:
            return self._applied_inside(self._inside, window, parts, peak)
        for part in parts:
            self._micro_batch(window, part)
            peak.see(plan_of(self.model) if runs_planned(self.model) else None)
        if len(parts) > 1 and not window.counted:
            for part in parts:
                self._labels.look(part)
        return self._update.finish(window)

    def _micro_batch(self, window: Window, batch: Any) -> None:
        loss = window.add(self._loss(batch))
        if self._watch is not None and loss is not None:
            self._watch.end_step(loss)

    def _loss(self, batch: Any) -> Any:
        """Forward and loss. The output is gone before the backward runs."""
        with self.precision.autocast(self._device):
            call = self._forward or default_forward(batch)
            output = call(self.model, batch)
        if self.loss is not None:
            return self.loss(self.precision.cast_up(output), batch)
        found = find_loss(output)
        if found is None:
            raise GradstowError(
                f"the model's output ({type(output).__name__}) is no loss and has none that can be trained. Give "
                "loss=lambda output, batch: ..."
            )
        return as_float(found)

    def _applied_inside(
        self, inside: Inside, window: Window, parts: list[Any], peak: Peak
    ) -> tuple[float, ClipResult, str | None]:
        check_inside(self.clip, micro_batches=len(parts))
        try:
            with inside.window() as applied:
                self._micro_batch(window, parts[0])
        except BaseException as error:
            error.add_note(
                "gradstow: with optimizer_in_backward=True the weights whose gradients were complete are changed "
                "already. Load a checkpoint: step.load(path)."
            )
            self._update.written = True
            raise
        peak.see(plan_of(self.model) if runs_planned(self.model) else None)
        if not window.means:
            self._update.skip("the loss counted no items", finite=True)
            return float("nan"), ClipResult(torch.zeros(()), None, 0.0), "the loss counted no items"
        self._update.commit()
        clipped = applied.result
        assert clipped is not None, "the window is over"
        loss, norm = window.read(clipped.norm)
        if norm != norm or norm == float("inf"):
            warn_user(
                f"gradstow: the norm of the gradients is {norm}, and optimizer_in_backward=True has applied them. Load "
                "a checkpoint, and step after the backward to skip such windows."
            )
        self._update.advance()
        return loss, ClipResult(clipped.norm, clipped.limit, norm), None

    def _undo(self, error: BaseException) -> None:
        """After an error: as before the window, unless the weights are written."""
        self._clear()
        if not self._update.committed:
            self._update.undo()
            if not self._update.written:
                self._snapshot.restore(error)
        if isinstance(error, KeyboardInterrupt):
            self._fit.again()

    def _smaller(self, batches: list[Any], samples: list[int]) -> bool:
        if self._update.committed or self._update.written:
            return False
        try:
            sizes = samples if len(samples) > 1 else [size_of(batches[0])]
        except GradstowError:
            return False
        return self._fit.shrink(sizes)

    def _free(self, why: str) -> None:
        gc.collect()
        if self._device == "cuda":
            torch.cuda.empty_cache()
        warn_user(
            f"gradstow: this step ran out of memory ({why}). It is tried once more with micro-batches of "
            f"{self._fit.micro_batch} samples, which all later steps keep to."
        )

    def _own(self) -> list[torch.nn.Parameter]:
        """The optimizers' parameters, which may be more than at the beginning: groups can be added."""
        return [p for o in self.optimizers for group in o.param_groups for p in group["params"]]

    def _clear(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        for parameter in self._others:
            parameter.grad = None

    def _check_modes(self) -> None:
        if torch.is_autocast_enabled(self._device):
            raise GradstowError(
                "the step was called inside an autocast block, and its backward would run in it, too. Call it outside "
                'and give TrainStep(precision="bf16") or "fp16".'
            )
        if not torch.is_grad_enabled():
            raise GradstowError("the step was called under torch.no_grad, and a step needs gradients. Call it outside.")

    def state_dict(self) -> dict[str, Any]:
        """Everything that a run needs to go on bit for bit: model, optimizers, schedulers, scaler, clipping, counters,
        the place in the data, random streams. Its tensors are the live ones: deepcopy it to keep it in memory."""
        return run_state(self, self._update, self._fit)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state_dict``. Random streams are set last; gradients are cleared.

        Raises:
            GradstowError: it is of another format, or of other optimizers, schedulers, clipping or precision; then
                nothing is changed. Errors of torch's own ``load_state_dict`` come as they are, with a part loaded.
        """
        load_run(self, self._update, self._fit, state, own=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``state_dict`` to a file, whole or not at all, also where the process is killed meanwhile.

        Raises:
            GradstowError: it cannot be written; what was there before still is.
        """
        write_state(self.state_dict(), path)

    def load(self, path: str | os.PathLike[str], *, weights_only: bool = True) -> None:
        """Go on from a file that ``save`` wrote.

        Args:
            weights_only: read nothing but tensors, numbers, text and containers; False runs code that the file names.

        Raises:
            GradstowError: missing, damaged, or of another run: see ``load_state_dict``.
        """
        load_run(self, self._update, self._fit, read_state(path, weights_only), own=True)

    def __repr__(self) -> str:
        size = "whole batches" if self.micro_batch is None else f"micro-batches of {self.micro_batch}"
        return f"<TrainStep {type(self.model).__name__} {self.precision.name}, {size}, {self.steps} steps>"
