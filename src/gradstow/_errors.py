"""The error types a user can catch; each message states the fact, then its context, then the way out. And warnings."""

from __future__ import annotations

import sys
import types
import warnings


class GradstowError(Exception):
    """Base of every error that gradstow raises on purpose."""


class BudgetTooSmall(GradstowError, ValueError):
    """No plan fits the budget.

    Attributes:
        budget_bytes: what was asked for, in bytes, all live bytes of training counted.
        minimum_bytes: the smallest budget the planner can meet, in bytes.
    """

    def __init__(self, message: str, *, budget_bytes: int = 0, minimum_bytes: int = 0) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes


class BudgetError(GradstowError, ValueError):
    """A budget that means nothing: zero, negative, NaN, a bare fraction, an unknown unit."""


class CaptureError(GradstowError, RuntimeError):
    """The training step cannot be captured or run as planned; the model still trains as plain."""


class StalePlan(GradstowError, ValueError):
    """A plan that does not belong to this model, batch, torch version, or is damaged."""


class PolicyError(GradstowError, ValueError):
    """A policy or action name that does not exist or contradicts the model."""


class OffloadError(GradstowError, OSError):
    """A place for offloaded values cannot be used, is full, or gave back other bytes than it was given."""


def warn_user(text: str) -> None:
    """Warn at the line outside of gradstow and torch that led here."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and _is_internal(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def _is_internal(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("gradstow", "torch")
