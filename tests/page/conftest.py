"""A browser without a window. Where there is none, the tests are skipped."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    found = shutil.which("chromium"), shutil.which("chromedriver")
    if None in found:
        pytest.skip("needs chromium and chromedriver, such as Debian's packages chromium and chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for flag in (*_FLAGS, f"--user-data-dir={folder}"):
            options.add_argument(flag)
        options.binary_location = str(found[0])
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = webdriver.Chrome(options, webdriver.ChromeService(str(found[1])))
        yield driver
        driver.quit()


@pytest.fixture
def artefacts(tmp_path: Path) -> Path:
    """Where screenshots are kept: $GRADSTOW_ARTEFACTS, or a folder of pytest's."""
    folder = Path(os.environ.get("GRADSTOW_ARTEFACTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
