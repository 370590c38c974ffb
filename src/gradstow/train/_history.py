"""A limit for the next gradient norm from those before it. Plain numbers: no tensors in here."""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

_TO_DEVIATION = 1.4826  # median absolute deviation → standard deviation of a normal distribution


class History(ABC):
    """Norms before clipping, of which each is entered as at most ``outlier`` times the limit that held for it.

    So a single outlier moves the limit little, and a lasting change moves it by that factor again and again. Norms
    that are zero or not finite say nothing and are not entered. The limit is ``first`` until ``warmup`` norms are
    there.
    """

    kind = ""

    def __init__(self, warmup: int, first: float | None, outlier: float) -> None:
        self.warmup, self.first, self.outlier = warmup, first, outlier

    @property
    @abstractmethod
    def entered(self) -> int:
        """How many norms count, up to ``warmup`` at least."""

    @property
    def limit(self) -> float | None:
        """For the next norm; None where there is none yet."""
        return self._limit() if self.entered >= self.warmup else self.first

    def add(self, norm: float) -> None:
        if not math.isfinite(norm) or norm <= 0:
            return
        limit = self.limit
        self._enter(norm if limit is None else min(norm, self.outlier * limit))

    @abstractmethod
    def _limit(self) -> float: ...

    @abstractmethod
    def _enter(self, norm: float) -> None: ...

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Numbers and lists from which ``restore`` goes on bit for bit."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None: ...


class Percentile(History):
    """The ``percentile`` of the last ``window`` norms: one that really was there, never one between two."""

    kind = "percentile"

    def __init__(self, percentile: float, window: int, warmup: int, first: float | None, outlier: float) -> None:
        super().__init__(warmup, first, outlier)
        self.percentile = percentile
        self._norms: deque[float] = deque(maxlen=window)

    @property
    def entered(self) -> int:
        return len(self._norms)

    def _limit(self) -> float:
        return float(np.percentile(list(self._norms), self.percentile, method="lower"))

    def _enter(self, norm: float) -> None:
        self._norms.append(norm)

    def state(self) -> dict[str, Any]:
        return {"norms": list(self._norms)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._norms = deque((float(n) for n in state["norms"]), maxlen=self._norms.maxlen)


class Deviations(History):
    """Exponential mean plus ``deviations`` exponential standard deviations.

    Both begin as the median of the warm-up's norms and their spread about it, so that an outlier among the first steps
    does not count.
    """

    kind = "deviations"

    def __init__(self, deviations: float, decay: float, warmup: int, first: float | None, outlier: float) -> None:
        super().__init__(warmup, first, outlier)
        self.deviations, self.decay = deviations, decay
        self._early: list[float] = []
        self._mean = self._variance = 0.0

    @property
    def entered(self) -> int:
        return len(self._early)

    def _limit(self) -> float:
        return self._mean + self.deviations * math.sqrt(self._variance)

    def _enter(self, norm: float) -> None:
        if self.entered < self.warmup:
            self._early.append(norm)
            if self.entered == self.warmup:
                self._mean = statistics.median(self._early)
                spread = statistics.median(abs(n - self._mean) for n in self._early)
                self._variance = (_TO_DEVIATION * spread) ** 2
            return
        apart = norm - self._mean
        self._mean += (1 - self.decay) * apart
        self._variance = self.decay * (self._variance + (1 - self.decay) * apart * apart)

    def state(self) -> dict[str, Any]:
        return {"early": list(self._early), "mean": self._mean, "variance": self._variance}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._early = [float(n) for n in state["early"]]
        self._mean, self._variance = float(state["mean"]), float(state["variance"])
