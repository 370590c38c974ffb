"""Settings for the tests with real models."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True, scope="session")
def _no_trace_log() -> None:
    """Keep torch's own trace out of pytest's log capture, where writing it down takes half of the time."""
    logging.getLogger("torch.__trace").disabled = True
