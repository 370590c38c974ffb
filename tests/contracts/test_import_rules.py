"""The import rules in ``pyproject.toml`` allow what docs/design.md allows (section 2) and catch the rest.

``make check`` runs them on gradstow itself; here they run on a made-up package with the same rooms.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("importlinter", reason="import-linter is in the dev extra")

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
FILES = [
    "_errors",
    "_units",
    "_signature",
    "_ops",
    "_lossy",
    "_codes",
    "_wanted",
    "_coding",
    "errors",
    "_files",
    "_frontier",
    "_plan",
    "_profile",
    "_api",
    "_planning",
    "_run",
    "_stow",
    "_verify",
    "__main__",
]
ROOMS = ["actions", "capture", "cli", "cost", "distributed", "execute", "integrations", "ir", "layers", "offload"]
ROOMS += ["planner", "report", "train"]
ALLOWED = [
    ("_units", "_errors"),
    ("ir", "_units"),
    ("capture", "ir"),
    ("capture", "_signature"),
    ("cost", "ir"),
    ("actions", "ir"),
    ("capture", "actions"),
    ("planner", "actions"),
    ("planner", "cost"),
    ("execute", "actions"),
    ("execute", "capture"),
    ("report", "ir"),
    ("layers", "_errors"),
    ("layers", "_units"),
    ("_api", "planner"),
    ("_api", "execute"),
    ("_api", "report"),
    ("_api", "_stow"),
    ("_stow", "capture"),
    ("_stow", "_plan"),
    ("_plan", "report"),
    ("_verify", "_stow"),
    ("_profile", "_verify"),
    ("_api", "_profile"),
    ("_plan", "_files"),
    ("train", "_api"),
    ("train", "layers"),
    ("cli", "train"),
    ("integrations", "train"),
    ("__main__", "cli"),
]
FORBIDDEN = [
    ("_errors", "ir"),
    ("_signature", "capture"),
    ("ir", "capture"),
    ("ir", "planner"),
    ("ir", "report"),
    ("capture", "cost"),
    ("cost", "capture"),
    ("actions", "capture"),
    ("actions", "cost"),
    ("actions", "execute"),
    ("planner", "execute"),
    ("execute", "planner"),
    ("planner", "_api"),
    ("execute", "report"),
    ("report", "capture"),
    ("report", "cost"),
    ("report", "actions"),
    ("report", "planner"),
    ("layers", "ir"),
    ("layers", "_signature"),
    ("ir", "layers"),
    ("_api", "train"),
    ("_plan", "_stow"),
    ("train", "cli"),
    ("cli", "integrations"),
]


def write_package(folder: Path, imports: list[tuple[str, str]], more: dict[str, str] | None = None) -> None:
    """Write a package with every room, in which each pair's first half imports the second."""
    package = folder / "gradstow"
    homes = {name: package / f"{name}.py" for name in FILES}
    homes |= {name: package / name / "inner.py" for name in ROOMS}
    text = dict.fromkeys([package / "__init__.py", *homes.values()], "")
    text |= {package / room / "__init__.py": "" for room in ROOMS}
    for importer, imported in imports:
        inner = ".inner" if imported in ROOMS else ""
        text[homes[importer]] += f"import gradstow.{imported}{inner}\n"
    text |= {package / name: content for name, content in (more or {}).items()}
    for path, content in text.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def lint(folder: Path) -> tuple[int, str]:
    """Exit code and output of the project's rules on the package in ``folder``."""
    command = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", command, "--config", str(PYPROJECT), "--no-cache"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


def test_what_the_design_allows_passes(tmp_path: Path) -> None:
    write_package(tmp_path, ALLOWED)
    code, output = lint(tmp_path)
    assert code == 0, output


def test_every_import_that_points_right_is_named(tmp_path: Path) -> None:
    write_package(tmp_path, FORBIDDEN)
    code, output = lint(tmp_path)
    assert code != 0
    missed = [
        f"{importer} -> {imported}"
        for importer, imported in FORBIDDEN
        if f"gradstow.{importer} is not allowed to import gradstow.{imported}:" not in output
    ]
    assert not missed, output


def test_the_way_round_through_the_public_names_is_seen(tmp_path: Path) -> None:
    public = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from gradstow._api import plan\n"
    write_package(tmp_path, [], {"__init__.py": public, "cost/inner.py": "from gradstow import plan\n"})
    code, output = lint(tmp_path)
    assert code != 0
    assert "gradstow.cost is not allowed to import gradstow._api:" in output


def test_a_room_without_a_place_is_named(tmp_path: Path) -> None:
    write_package(tmp_path, [], {"attic/__init__.py": ""})
    code, output = lint(tmp_path)
    assert code != 0
    assert "- gradstow.attic" in output


def test_rooms_that_do_not_exist_break_nothing(tmp_path: Path) -> None:
    (tmp_path / "gradstow").mkdir()
    for name in ("__init__", "_errors", "_units", "_signature", "errors"):
        (tmp_path / "gradstow" / f"{name}.py").touch()
    code, output = lint(tmp_path)
    assert code == 0, output
