"""The error types a user can catch; each message states the fact, then its context, then the way out."""

from __future__ import annotations


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
