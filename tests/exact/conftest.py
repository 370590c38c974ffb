"""Settings for the tests with real models."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import pytest

from gradstow.ir import CostTable, OpCost


@pytest.fixture(autouse=True, scope="session")
def _no_trace_log() -> None:
    """Keep torch's own trace out of pytest's log capture, where writing it down takes half of the time."""
    logging.getLogger("torch.__trace").disabled = True


@pytest.fixture
def guessed_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every op costs the same: for tests in which only the numbers matter, and timing ops takes longest."""

    def guess(signatures: Iterable[str], device: str, _limit: int, progress: Callable[[int, int], None]) -> CostTable:
        progress(1, 1)
        return CostTable({text: OpCost(1e-5) for text in signatures}, device)

    monkeypatch.setattr("gradstow._planning.measured_costs", guess)
