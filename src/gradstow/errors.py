"""The errors that gradstow raises on purpose; catch ``GradstowError`` for all of them."""

from gradstow._errors import (
    BudgetError,
    BudgetTooSmall,
    CaptureError,
    GradstowError,
    OffloadError,
    PolicyError,
    StalePlan,
)

__all__ = ["BudgetError", "BudgetTooSmall", "CaptureError", "GradstowError", "OffloadError", "PolicyError", "StalePlan"]
