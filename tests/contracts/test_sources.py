"""No file names somebody's machine; no source file and no function grows past what can be read."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE_LIMIT = 600
FUNCTION_LIMIT = 100
MACHINE_PATH = re.compile(r"(?<![\w.~*}/-])/(?:home|root|Users|work|workspace)/[\w.-]*")


def machine_paths(text: str) -> list[str]:
    """Absolute paths that exist on one machine only."""
    return MACHINE_PATH.findall(text)


def too_long(text: str) -> list[str]:
    """What is too long in a Python source: the file itself, or functions by name."""
    lines = text.count("\n")
    found = [f"{lines} lines"] if lines >= FILE_LIMIT else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length >= FUNCTION_LIMIT:
                found.append(f"{node.name}: {length} lines")
    return found


def project_files() -> list[Path]:
    """Files that are committed, or would be."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"not a git checkout: {done.stderr.strip()}")
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_names_a_machine() -> None:
    guilty = {}
    for path in project_files():
        found = machine_paths(path.read_text(encoding="utf-8", errors="ignore"))
        if found:
            guilty[str(path.relative_to(ROOT))] = found
    assert not guilty


@pytest.mark.parametrize("place", ["root", "work", "home", "Users"])
def test_a_machine_path_is_seen(place: str) -> None:
    path = f"/{place}/somebody"
    assert machine_paths(f'open("{path}/x.py")') == [path]
    assert machine_paths(f"cd {path} && make") == [path]
    assert not machine_paths(f"see https://example.org{path} and docs{path} and ./{path[1:]}")


def test_sources_stay_short() -> None:
    guilty = {}
    for folder in ("src", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            found = too_long(path.read_text(encoding="utf-8"))
            if found:
                guilty[str(path.relative_to(ROOT))] = found
    assert not guilty


def test_what_is_too_long_is_seen() -> None:
    body = "    pass\n" * (FUNCTION_LIMIT - 1)
    assert too_long(f"def long():\n{body}") == ["long: 100 lines"]
    assert too_long(f"class C:\n  async def long():\n{body}") == ["long: 100 lines"]
    assert not too_long(f"def short():\n{body[:-9]}")
    assert too_long("x = 1\n" * FILE_LIMIT) == ["600 lines"]
    assert not too_long("x = 1\n" * (FILE_LIMIT - 1))
