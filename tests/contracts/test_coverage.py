"""The limit on coverage fails where lines, branches or a whole package are missed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from covered import PACKAGES, shares, too_low

ROOT = Path(__file__).parents[2]


def report(**changes: dict[str, int]) -> dict[str, Any]:
    """Two files of each package, all covered but for what is given for the second one."""
    full = {"num_statements": 100, "covered_lines": 100, "num_branches": 40, "covered_branches": 40}
    files = {}
    for package in ("ir", "planner", "actions"):
        files[f"src/gradstow/{package}/_one.py"] = {"summary": full}
        files[f"src/gradstow/{package}/_two.py"] = {"summary": {**full, **changes.get(package, {})}}
    return {"files": files}


def test_all_covered() -> None:
    assert too_low(report()) == []
    assert shares(report(), PACKAGES[0]) == {"lines": 100.0, "branches": 100.0}


def test_the_limit_itself_is_enough() -> None:
    assert too_low(report(ir={"covered_lines": 90, "covered_branches": 36})) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ir": {"covered_lines": 89}}, ["src/gradstow/ir/: 94.5 % of lines, under 95 %"]),
        ({"ir": {"covered_branches": 35}}, ["src/gradstow/ir/: 93.8 % of branches, under 95 %"]),
        ({"planner": {"covered_lines": 0, "covered_branches": 0}}, ["50.0 % of lines", "50.0 % of branches"]),
    ],
)
def test_less_is_named(changes: dict[str, dict[str, int]], words: list[str]) -> None:
    low = too_low(report(**changes))
    assert len(low) == len(words)
    assert all(word in line for word, line in zip(words, low, strict=True))


def test_a_package_that_nothing_imported_fails() -> None:
    assert len(too_low({"files": {}})) == 6


def test_the_command_fails_with_the_limit() -> None:
    for changes, code in (({}, 0), ({"ir": {"covered_lines": 0}}, 1)):
        done = subprocess.run(
            [sys.executable, ROOT / "tests" / "covered.py"],
            input=json.dumps(report(**changes)),
            env={**os.environ},
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stderr
        assert ("50.0 % of lines, under 95 %" in done.stderr) == bool(code)
