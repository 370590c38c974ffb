"""What every test gets: the device under test, and an environment of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable

import pytest

DEVICE = os.environ.get("GRADSTOW_TEST_DEVICE", "cpu")

_cache = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Before any test is collected: no test reads or writes the user's cache, none goes to the network, and each plans
    for itself."""
    config.stash[_cache] = tempfile.mkdtemp(prefix="gradstow-test-cache-")
    os.environ["GRADSTOW_CACHE_DIR"] = config.stash[_cache]
    os.environ["GRADSTOW_PLAN_CACHE"] = "0"
    os.environ["HF_HUB_OFFLINE"] = "1"
    if DEVICE.startswith("cuda"):  # cuBLAS reads it once; deterministic algorithms need it
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash.get(_cache, ""), ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if DEVICE.startswith("cuda"):
        return
    skip = pytest.mark.skip(reason=f"needs GRADSTOW_TEST_DEVICE=cuda, which is {DEVICE!r} here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def device() -> str:
    """The device under test, from GRADSTOW_TEST_DEVICE; one that is not there is an error, not a skip."""
    if DEVICE.startswith("cuda"):
        import torch

        assert torch.cuda.is_available(), f"GRADSTOW_TEST_DEVICE={DEVICE}, but torch sees no CUDA device"
    return DEVICE


@pytest.fixture
def guessed_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every op costs the same and needs no working memory, on every machine: where only the numbers matter, and timing
    ops takes longest."""
    from gradstow.ir import CostTable, OpCost  # not before the environment is set

    def guess(signatures: Iterable[str], device: str, _limit: int, progress: Callable[[int, int], None]) -> CostTable:
        progress(1, 1)
        return CostTable({text: OpCost(1e-5) for text in signatures}, device)

    monkeypatch.setattr("gradstow._planning.measured_costs", guess)
