"""The error for what a user typed."""

from __future__ import annotations

from gradstow._errors import GradstowError


class InputError(GradstowError, ValueError):
    """An argument that means nothing here: exit code 2."""
