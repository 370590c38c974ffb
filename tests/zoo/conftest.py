"""The zoo in CI: the models of ``make zoo`` that are quick."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zoo._workers import guessed_seconds


@pytest.fixture(autouse=True)
def _guessed_seconds() -> Iterator[None]:
    """Timing ops takes longest, and here only numbers and peaks matter."""
    with guessed_seconds():
        yield
