"""README.md says only what is there: its Python runs, its names, make targets and commands exist.

All ```python blocks run in order in one interpreter, after PREAMBLE. A block that cannot run here (needs a
GPU, a download) has the line ``<!-- not run: reason -->`` directly above it; its names are checked even so.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import gradstow

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
FENCE = re.compile(r"^(?P<skip><!-- not run: [^\n]+ -->\s*\n)?```(?P<language>[a-z]*)\n(?P<body>.*?)^```$", re.M | re.S)
MAKE = re.compile(r"^(?:\$ )?make ([a-z][\w-]*)", re.M)
COMMAND = re.compile(r"^(?:\$ )?(?:\.venv/bin/)?(?:python3? -m )?gradstow ([a-z][\w-]*)", re.M)
PREAMBLE = """
import torch
from torch import nn

torch.manual_seed(0)
blocks = [m for _ in range(4) for m in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
batch = (torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,)))
loader = [batch, batch]
optimizer = opt = torch.optim.SGD(model.parameters(), lr=0.1)


def loss_fn(output, batch):
    return nn.functional.cross_entropy(output, batch[1])
"""


def readme() -> str:
    if not README.exists():
        pytest.skip("README.md is not written yet")
    return README.read_text(encoding="utf-8")


def python_blocks(text: str, skipped: bool) -> list[str]:
    """Python blocks that run, with the marked ones too where ``skipped``."""
    blocks = [m for m in FENCE.finditer(text) if m["language"] == "python"]
    return [m["body"] for m in blocks if skipped or not m["skip"]]


def shell_text(text: str) -> str:
    """Everything that a reader could type into a shell: shell blocks and inline code, one per line."""
    shells = ("", "bash", "console", "sh", "shell")
    blocks = [m["body"] for m in FENCE.finditer(text) if m["language"] in shells]
    return "\n".join(blocks + re.findall(r"`([^`\n]+)`", FENCE.sub("", text)))


def unknown_names(code: str) -> set[str]:
    """Names taken from gradstow in ``code`` that are not public."""
    aliases, taken = {"gradstow", "gs"}, set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            taken.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module == "gradstow":
            taken.update(alias.name for alias in node.names)
    return taken - set(gradstow.__all__)


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in ``folder``, so that what an example saves does not land in the checkout."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=300, cwd=folder
    )


def run_blocks(folder: Path, *blocks: str) -> subprocess.CompletedProcess[str]:
    (folder / "readme.py").write_text("\n".join([PREAMBLE, *blocks]), encoding="utf-8")
    return run(folder, "readme.py")


def test_names_in_the_readme_are_public() -> None:
    blocks = python_blocks(readme(), skipped=True)
    assert blocks, "README.md has no Python block"
    assert not set().union(*(unknown_names(block) for block in blocks))


def test_python_in_the_readme_runs(tmp_path: Path) -> None:
    blocks = python_blocks(readme(), skipped=False)
    if find_spec("gradstow._api") is None:
        pytest.skip("gradstow._api is not written yet")
    assert blocks, "README.md has no Python block that runs"
    done = run_blocks(tmp_path, *blocks)
    assert done.returncode == 0, done.stderr


def test_make_targets_in_the_readme_exist() -> None:
    named = set(MAKE.findall(shell_text(readme())))
    assert {"demo", "test"} <= named, "README.md names the two commands that do everything"
    assert named <= make_targets()


def test_commands_in_the_readme_exist(tmp_path: Path) -> None:
    named = set(COMMAND.findall(shell_text(readme())))
    spec = find_spec("gradstow.cli")
    if spec is None or spec.origin is None:
        pytest.skip("gradstow.cli is not written yet")
    answers = {name: run(tmp_path, "-m", "gradstow", name, "--help") for name in sorted(named)}
    assert not {name: done.stderr for name, done in answers.items() if done.returncode}


def test_what_is_wrong_in_a_readme_is_seen(tmp_path: Path) -> None:
    text = (
        "Type `make dmo` or `gradstow dmo`.\n\n```python\nimport gradstow as gs\ngs.stwo(1)\n```\n\n"
        "<!-- not run: needs a GPU -->\n```python\nfrom gradstow import plann\n```\n\n"
        "```bash\n$ make tset  # all\n.venv/bin/gradstow plna x\n```\n"
    )
    ran, everything = python_blocks(text, skipped=False), python_blocks(text, skipped=True)
    assert [len(ran), len(everything)] == [1, 2]
    assert [unknown_names(block) for block in everything] == [{"stwo"}, {"plann"}]
    assert set(MAKE.findall(shell_text(text))) == {"dmo", "tset"}
    assert set(COMMAND.findall(shell_text(text))) == {"dmo", "plna"}
    assert not {"dmo", "tset"} & make_targets()
    assert {"demo", "test", "check", "gpu"} <= make_targets()
    done = run_blocks(tmp_path, "loss_fn(model(batch[0]), batch).backward()", *ran)
    assert done.returncode != 0
    assert "has no attribute 'stwo'" in done.stderr  # and nothing before it failed
