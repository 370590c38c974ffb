"""Gradient clipping: once per window, on unscaled gradients."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gradstow._errors import GradstowError
from gradstow._units import whole_number
from gradstow.train._history import Deviations, History, Percentile
from gradstow.train._norms import (
    EPS,
    factor_of,
    norm_of,
    replace,
    scale,
    together,
    total_norm,
    values_of,
    with_gradients,
)


@dataclass(frozen=True, slots=True)
class ClipResult:
    """What a window's clipping found.

    Attributes:
        norm: of all gradients before clipping, a 0-dim tensor; inf or NaN where a gradient is, and then nothing was
            clipped.
        limit: what was allowed, or None where there was no limit yet.
        value: ``norm`` as a number where it was read anyway, else None: reading it waits for the device.
    """

    norm: torch.Tensor
    limit: float | None
    value: float | None = None


class Clip(ABC):
    """Bounds the gradients of a window; one call per window."""

    @abstractmethod
    def __call__(self, parameters: Sequence[torch.nn.Parameter]) -> ClipResult:
        """Clip the gradients of ``parameters``; those that have none are left out, and a norm that is inf or NaN clips
        nothing."""

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` takes to go on bit for bit: plain numbers and lists."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state_dict``.

        Raises:
            GradstowError: it is of another kind of clipping.
        """
        if state:
            raise _other_state(self, state)

    @staticmethod
    def of(clip: object) -> Clip | None:
        """From what ``TrainStep`` takes as ``clip=``: None, a number for ``GlobalNorm``, or a clipping.

        Raises:
            GradstowError: anything else.
        """
        if clip is None or isinstance(clip, Clip):
            return clip
        if _is_number(clip):
            return GlobalNorm(clip)  # type: ignore[arg-type]
        raise GradstowError(
            f"clip={clip!r} is no clipping. Give a number (the largest global norm), gs.train.AdaptiveClip(), "
            "gs.train.PerParameter(1.0) or None."
        )


class GlobalNorm(Clip):
    """Scale all gradients by one factor where their norm together is over ``max_norm``.

    Equal to ``torch.nn.utils.clip_grad_norm_`` for gradients in float32 or float64. Norms of shorter floats are
    computed in float32. The norm of a sparse gradient is that of its coalesced values: one that was not coalesced is
    after that, and none becomes dense.

    Memory: one number per gradient, and the values of sparse gradients once more while these are coalesced.

    Raises:
        GradstowError: ``max_norm`` or ``norm_type`` is not positive.
    """

    def __init__(self, max_norm: float, norm_type: float = 2.0) -> None:
        self.max_norm, self.norm_type = _positive("max_norm", max_norm), _positive("norm_type", norm_type)

    def __call__(self, parameters: Sequence[torch.nn.Parameter]) -> ClipResult:
        found = with_gradients(parameters)
        norm = total_norm(found, self.norm_type)
        scale(found, self.max_norm, norm)
        return ClipResult(norm, self.max_norm)


class AdaptiveClip(Clip):
    """Scale all gradients by one factor where their norm is over a limit that follows the norms before it.

    The limit is the ``percentile`` of the last ``window`` norms, or their exponential mean plus ``deviations``
    exponential standard deviations; norms are those before clipping. An outlier is entered as at most ``outlier``
    times the limit. A norm that is not finite clips nothing and is not entered.

    Args:
        percentile: 90 where neither it nor ``deviations`` is given.
        window: norms that the percentile is of.
        decay: weight of the past in the exponential mean, per window.
        warmup: norms that must be there before there is a limit.
        first: the limit until then; None does not clip until then.
        outlier: over 1.

    Memory: ``window`` numbers on the host. One wait for the device per window, to read the norm.

    Raises:
        GradstowError: both kinds of limit, or a number out of range.

    Source: Seetharaman et al., AutoClip: Adaptive Gradient Clipping, 2020 (the percentile, there of all norms).
    """

    def __init__(
        self,
        percentile: float | None = None,
        *,
        deviations: float | None = None,
        window: int = 100,
        decay: float = 0.98,
        warmup: int = 20,
        first: float | None = None,
        outlier: float = 2.0,
        norm_type: float = 2.0,
    ) -> None:
        window, warmup = _whole("window", window), _whole("warmup", warmup)
        _check_history(percentile, deviations, window, decay, warmup, outlier)
        self.norm_type = _positive("norm_type", norm_type)
        first = None if first is None else _positive("first", first)
        self._history: History
        if deviations is None:
            self._history = Percentile(90.0 if percentile is None else percentile, window, warmup, first, outlier)
        else:
            self._history = Deviations(deviations, decay, warmup, first, outlier)

    @property
    def limit(self) -> float | None:
        """What the next window may have; None before the warm-up is over, where there is no ``first``."""
        return self._history.limit

    def __call__(self, parameters: Sequence[torch.nn.Parameter]) -> ClipResult:
        found = with_gradients(parameters)
        norm, limit = total_norm(found, self.norm_type), self.limit
        if limit is not None:
            scale(found, limit, norm)
        value = float(norm)
        self._history.add(value)
        return ClipResult(norm, limit, value)

    def state_dict(self) -> dict[str, Any]:
        return {"kind": self._history.kind, **self._history.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("kind") != self._history.kind:
            raise _other_state(self, state)
        self._history.restore(state)


class GradientClip(Clip):
    """Clips one gradient at a time, so that the optimizer can run inside the backward.

    Memory: a scaled copy of one gradient at a time.
    """

    def __init__(self, max_norm: float, norm_type: float = 2.0) -> None:
        self.max_norm, self.norm_type = _positive("max_norm", max_norm), _positive("norm_type", norm_type)
        self._norms: list[torch.Tensor] = []

    def __call__(self, parameters: Sequence[torch.nn.Parameter]) -> ClipResult:
        self.begin()
        for parameter in with_gradients(parameters):
            self.one(parameter)
        return self.finish()

    def begin(self) -> None:
        """A window starts. The norms of one that did not come to its end are forgotten."""
        self._norms = []

    def one(self, parameter: torch.nn.Parameter) -> None:
        """Clip this gradient, which is complete."""
        values = values_of(parameter)
        if values.numel():
            norm = norm_of(values, self.norm_type)
            self._norms.append(norm)
            factor = self._factor(norm)
            if factor is not None:
                replace(parameter, factor)

    def working_bytes(self, parameter: torch.nn.Parameter) -> int:
        """Bytes of the scaled copy of its gradient."""
        return parameter.nbytes

    def finish(self) -> ClipResult:
        """The window is over."""
        norm, self._norms = together(self._norms, self.norm_type), []
        return ClipResult(norm, self.max_norm)

    @abstractmethod
    def _factor(self, norm: torch.Tensor) -> torch.Tensor | None:
        """For a gradient of this norm; None leaves it alone."""


class PerParameter(GradientClip):
    """Scale each gradient by its own factor where its own norm is over ``max_norm``.

    Where the optimizer runs inside the backward each is clipped as soon as it is complete, else at the end of the
    window: the same numbers. The result's ``norm`` is that of all gradients together, before clipping; a gradient that
    is not finite is left as it is.

    Memory: a scaled copy of one gradient at a time.

    Raises:
        GradstowError: ``max_norm`` or ``norm_type`` is not positive.
    """

    def _factor(self, norm: torch.Tensor) -> torch.Tensor | None:
        return factor_of(self.max_norm, norm)


class PreviousNorm(GradientClip):
    """An approximation of ``GlobalNorm`` that can run inside the backward: its factor comes from the window before.

    The norm of all gradients is known only when all are there, which is what applying them one by one avoids. So each
    is scaled by max_norm / norm of the last window that had a finite one, where that is under 1; one whose own norm is
    then still over ``max_norm`` is scaled down to that. A sudden outlier reaches at most sqrt(n) times ``max_norm`` in
    n gradients, and the first window, too.

    Memory: a scaled copy of one gradient at a time. One wait for the device per window, to read the norm.

    Raises:
        GradstowError: ``max_norm`` or ``norm_type`` is not positive.
    """

    def __init__(self, max_norm: float, norm_type: float = 2.0) -> None:
        super().__init__(max_norm, norm_type)
        self._previous: float | None = None

    def finish(self) -> ClipResult:
        found = super().finish()
        value = float(found.norm)
        if math.isfinite(value):
            self._previous = value
        return ClipResult(found.norm, found.limit, value)

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "previous norm", "previous": self._previous}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("kind") != "previous norm":
            raise _other_state(self, state)
        self._previous = state["previous"]

    def _factor(self, norm: torch.Tensor) -> torch.Tensor | None:
        before = 1.0 if self._previous is None else min(1.0, self.max_norm / (self._previous + EPS))
        return before * factor_of(self.max_norm, norm * before)


def _is_number(item: object) -> bool:
    return isinstance(item, (int, float, np.integer, np.floating)) and not isinstance(item, bool)


def _whole(name: str, number: object) -> int:
    found = whole_number(number)
    if found is None:
        raise GradstowError(f"{name}={number!r} is no whole number. Give how many norms.")
    return found


def _positive(name: str, number: float) -> float:
    if not _is_number(number) or not number > 0:
        raise GradstowError(f"{name}={number!r} is not a positive number. Give one such as 1.0.")
    return float(number)


def _check_history(
    percentile: float | None, deviations: float | None, window: int, decay: float, warmup: int, outlier: float
) -> None:
    if percentile is not None and deviations is not None:
        raise GradstowError("AdaptiveClip has one limit: give percentile= or deviations=, not both.")
    for name, number in (("percentile", percentile), ("decay", decay), ("outlier", outlier)):
        if not _is_number(number) and not (name == "percentile" and number is None):
            raise GradstowError(f"{name}={number!r} is no number. Leave it out for the usual one.")
    if percentile is not None and not 0 < percentile <= 100:
        raise GradstowError(f"percentile={percentile!r} is not in (0, 100]. 90 is usual.")
    if deviations is not None:
        _positive("deviations", deviations)
    if not 0 < decay < 1:
        raise GradstowError(f"decay={decay!r} is not in (0, 1). 0.98 is usual.")
    if warmup < 1 or (deviations is None and warmup > window):
        raise GradstowError(f"warmup={warmup!r} is not at least 1 and at most window={window!r}.")
    if not outlier > 1:
        raise GradstowError(f"outlier={outlier!r} is not over 1, so a limit could never rise again. 2.0 is usual.")


def _other_state(clip: Clip, state: Mapping[str, Any]) -> GradstowError:
    return GradstowError(
        f"this clipping state is of kind {state.get('kind')!r}, and the run now clips by {type(clip).__name__}. Resume "
        "with the clip= that the run began with, or leave the clipping's state out."
    )
