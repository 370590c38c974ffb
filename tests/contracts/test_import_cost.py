"""``import gradstow`` loads no torch, and nothing optional is ever loaded by using a public name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
OPTIONAL = {"accelerate", "lightning", "matplotlib", "mlxtend", "ortools", "rich", "transformers", "typer"}
HEAVY = OPTIONAL | {"numpy", "scipy", "torch", "torchvision"}


def loaded_by(code: str, *folders: Path) -> set[str]:
    """Top-level names of the modules that ``code`` loads in an interpreter of its own."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    path = os.pathsep.join(str(folder) for folder in (SRC, *folders))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "code",
    [
        "import gradstow",
        "import gradstow as gs; dir(gs); gs.__version__; gs.errors.BudgetTooSmall",
        "from gradstow import errors",
        "from gradstow.errors import GradstowError",
    ],
)
def test_the_import_loads_nothing_heavy(code: str) -> None:
    assert not loaded_by(code) & HEAVY


@pytest.mark.parametrize("name", ["Plan", "measure_peak", "plain", "plan", "stow", "unstow", "verify"])
def test_a_public_name_loads_nothing_optional(name: str) -> None:
    if find_spec("gradstow._api") is None:
        pytest.skip("gradstow._api is not written yet")
    assert not loaded_by(f"import gradstow; gradstow.{name}") & OPTIONAL


def test_the_checker_sees_a_real_torch() -> None:
    assert "torch" in loaded_by("import gradstow, torch")


@pytest.mark.parametrize("name", sorted(HEAVY))
def test_the_checker_sees_each_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "guilty.py").write_text(f"import {name}.inner\n")
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    (tmp_path / name / "inner.py").touch()
    assert loaded_by("import gradstow, guilty", tmp_path) & HEAVY == {name}
