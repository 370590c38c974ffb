"""The end of a window: unscale, correct, clip, decide, step. Each once, whatever the number of micro-batches."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from gradstow._errors import GradstowError, warn_user
from gradstow.train._clip import Clip, ClipResult
from gradstow.train._norms import total_norm, with_gradients
from gradstow.train._precision import back_off, forget_unscaling
from gradstow.train._snapshot import OptimizerSteps, uninterrupted
from gradstow.train._window import Window

_IN_A_ROW = 20  # skipped windows after which it is said
Scheduler = Any  # torch's LRScheduler, or anything with step() and state_dict()


class Update:
    """One optimizer step per window, for one or several optimizers, or a skipped one.

    Attributes:
        steps, skipped: windows that were applied, and those that were not.
        committed: whether this window's step was done, so that it cannot be taken back.
        written: whether it broke off half-way, with weights partly written.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Scheduler],
        scaler: torch.amp.GradScaler | None,
        clip: Clip | None,
    ) -> None:
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise GradstowError(
                    "LBFGS runs the forward several times inside its step, which TrainStep's windows do not. "
                    "Use another optimizer, or your own loop."
                )
        for scheduler in schedulers:
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                raise GradstowError(
                    "ReduceLROnPlateau needs a figure of your own, such as the validation loss, and TrainStep steps "
                    "schedulers once per window. Step this one yourself, and leave it out here."
                )
        self.optimizers, self.schedulers, self.scaler, self.clip = optimizers, schedulers, scaler, clip
        self.steps = self.skipped = self._in_a_row = 0
        self.committed = self.written = self._unscaled = False
        self._clip_state: dict[str, Any] = {}

    def begin(self) -> None:
        """Before anything of a window runs."""
        self.committed = self.written = self._unscaled = False
        self._clip_state = {} if self.clip is None else self.clip.state_dict()

    def finish(self, window: Window) -> tuple[float, ClipResult, str | None]:
        """(loss of the window, norm and limit, why it was skipped or None). Waits for the device once."""
        owners = [o for o in self.optimizers if _with_gradients(o)]
        parameters = with_gradients(p for o in owners for p in _with_gradients(o))
        self._unscale(owners, parameters, window.correction)
        if self.clip is None:
            clipped = ClipResult(total_norm(parameters, 2.0) if parameters else torch.tensor(0.0), None)
        else:
            clipped = self.clip(parameters)
        loss, norm = window.read(clipped.norm)
        clipped = ClipResult(clipped.norm, clipped.limit, norm)
        why = _why_skipped(loss, norm, window, bool(owners))
        if why is None:
            self._apply(owners)
        else:
            self.skip(why, finite=math.isfinite(norm) and (math.isfinite(loss) or not window.means))
        return loss, clipped, why

    def _unscale(
        self, owners: Sequence[torch.optim.Optimizer], parameters: Sequence[torch.nn.Parameter], correction: float
    ) -> None:
        if self.scaler is not None and owners:
            self._unscaled = True
            for optimizer in owners:
                self.scaler.unscale_(optimizer)
        if correction != 1:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(correction)

    def _apply(self, owners: Sequence[torch.optim.Optimizer]) -> None:
        steps = OptimizerSteps(owners)
        with uninterrupted():
            try:
                for optimizer in owners:
                    if self.scaler is None:
                        optimizer.step()
                    else:
                        self.scaler.step(optimizer)
            except BaseException as error:
                self.written = not steps.undo()
                if self.written:
                    error.add_note(
                        "gradstow: this error came from inside optimizer.step, after it may have written weights or "
                        "state: they cannot be put back without a second copy. Load a checkpoint: step.load(path)."
                    )
                raise
            self.commit()
            if self.scaler is not None:
                self.scaler.update()
            self.advance(all_stepped=len(owners) == len(self.optimizers))

    def commit(self) -> None:
        """The weights are written."""
        self.committed, self._unscaled = True, False
        self.steps += 1
        self._in_a_row = 0

    def advance(self, all_stepped: bool = True) -> None:
        """Step the schedulers."""
        with contextlib.nullcontext() if all_stepped else warnings.catch_warnings():
            if not all_stepped:  # torch warns of the scheduler of an optimizer that was passed over
                warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)` before")
            for scheduler in self.schedulers:
                scheduler.step()

    def skip(self, why: str, finite: bool) -> None:
        if self.clip is not None:
            self.clip.load_state_dict(self._clip_state)
        if self.scaler is not None and self._unscaled:
            (forget_unscaling if finite else back_off)(self.scaler)
            self._unscaled = False
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row == _IN_A_ROW:
            warn_user(
                f"gradstow: the last {_IN_A_ROW} windows were all skipped, this one because {why}. Nothing is learned. "
                "Look at the data and the learning rate; result.skipped says why for each window."
            )

    def undo(self) -> None:
        """After an error in a window that was not committed."""
        if self.clip is not None:
            self.clip.load_state_dict(self._clip_state)
        if self.scaler is not None and self._unscaled:
            forget_unscaling(self.scaler)
            self._unscaled = False


def _with_gradients(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _why_skipped(loss: float, norm: float, window: Window, any_gradient: bool) -> str | None:
    if not window.means:
        return "the loss counted no items"
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if not math.isfinite(norm):
        return f"the norm of the gradients is {norm}"
    return None if any_gradient else "no parameter of the optimizer got a gradient"
