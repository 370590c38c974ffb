"""README.md and docs/ say only what is there: code runs, names, commands, files and links exist, figures are measured.

All Python blocks of a page run in order after PREAMBLE; see ``documents`` for the marks that pages may use.
"""

from __future__ import annotations

import ast
import csv
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import gradstow
from documents import (
    ROOT,
    Block,
    agrees,
    blocks,
    broken_links,
    commands,
    documents,
    inline,
    numbers,
    run,
    shell_lines,
    steps,
)

README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
PREAMBLE = """
import torch
from torch import nn

torch.manual_seed(0)
blocks = [m for _ in range(3) for m in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
batch = (torch.randn(8, 3, 16, 16), torch.randint(0, 10, (8,)))
loader = [batch, batch]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def loss_fn(output, batch):
    return nn.functional.cross_entropy(output, batch[1])
"""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def every_page() -> dict[str, str]:
    return {name(path): path.read_text(encoding="utf-8") for path in documents()}


# ---------------------------------------------------------------------------------------- Python


def unknown_names(code: str) -> set[str]:
    """Names taken from gradstow in ``code`` that are not public."""
    aliases, taken = {"gradstow", "gs"}, set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            taken.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module == "gradstow":
            taken.update(alias.name for alias in node.names)
    return taken - set(gradstow.__all__)


@pytest.mark.slow  # plans, verifies and trains about twenty times, in one process
def test_python_runs(tmp_path: Path) -> None:
    """And the shell lines that are marked so: from a file of one's own to a verified plan."""
    pages = {page: found for page, text in every_page().items() if (found := steps(text))}
    assert {"README.md", "docs/stow.md", "docs/train.md"} <= set(pages)
    failed = run(tmp_path, pages, PREAMBLE)
    assert not failed, "\n\n".join(f"{page}: {why}" for page, why in failed.items())


def test_the_start_is_the_same_in_both_places() -> None:
    """README.md runs it; a newcomer gets to a verified model of their own in five commands or fewer."""
    pages = every_page()
    here, there = (
        [b for b in blocks(pages[p]) if b.file or "my_model" in b.body] for p in ("README.md", "docs/start.md")
    )
    assert [b.file for b in here] == ["my_model.py", None]
    assert here[0] == there[0]
    typed = [line for block in (here[1], there[1]) for line in shell_lines(block.body)]
    assert typed[:2] == typed[2:] == [f"gradstow {c} my_model.py:make --budget 70%" for c in ("plan", "verify")]
    install = next(b for b in blocks(pages["README.md"], "sh") if "pip install" in b.body)
    assert len(shell_lines(install.body)) + 2 <= 5


def test_python_names_what_is_public() -> None:
    found = {page: [b.body for b in blocks(text, "python")] for page, text in every_page().items()}
    assert found["README.md"]
    assert not set().union(*(unknown_names(code) for page in found.values() for code in page))


def test_code_that_does_not_run_says_why() -> None:
    """Every block is in a language that is checked, or is marked as something else."""
    known = {"python", "sh", "text"}
    other = {(p, b.language) for p, text in every_page().items() for b in blocks(text) if b.language not in known}
    assert other <= {("docs/design.md", "")}, "drawings and lists of folders"


def test_faults_in_python_are_seen(tmp_path: Path) -> None:
    text = (
        "```python\ngs.stwo(1)\n```\n\n<!-- not run: needs a GPU -->\n```python\nfrom gradstow import plann\n```\n\n"
        "```sh\ngradstow plan a.py:make\n```\n\n<!-- run -->\n```sh\ngradstow plna a.py:make\n```\n"
    )
    assert [unknown_names(block.body) for block in blocks(text, "python")] == [{"stwo"}, {"plann"}]
    first, last = steps(text)
    good = Block("python", "# a.py\nloss_fn(model(batch[0]), batch).backward()\n")
    pages = {"a name": [good, first], "no error": [good], "a command": [last]}
    failed = run(tmp_path, pages, f"import gradstow as gs\n{PREAMBLE}")
    assert set(failed) == {"a name", "a command"}
    assert "a name, Python block 2" in failed["a name"]
    assert "has no attribute 'stwo'" in failed["a name"]
    assert "gradstow plna a.py:make ended with exit code 2" in failed["a command"]


# --------------------------------------------------------------------------------- shell, links


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


def refusal(line: str) -> str | None:
    """Why a line of a shell block, or of inline code, cannot be meant; None where nothing speaks against it.

    A ``gradstow`` line is parsed as the command would, without running it.
    """
    program, *arguments = shlex.split(line)
    if program == "make":
        return None if set(arguments) <= make_targets() else f"no such target: {line}"
    if program in ("python", "python3") and arguments[0].endswith(".py"):
        return None if (ROOT / arguments[0]).exists() else f"no such file: {line}"
    return refused_arguments(arguments) if program == "gradstow" else None


def refused_arguments(arguments: list[str]) -> str | None:
    import typer

    from gradstow.cli._app import app

    command: Any = typer.main.get_command(app)
    context, rest = command.make_context("gradstow", list(arguments)), list(arguments)
    try:
        while hasattr(command, "resolve_command") and rest:
            named, command, rest = command.resolve_command(context, rest)
            context = command.make_context(named, list(rest), parent=context)
    except Exception as error:  # click's; typer may carry a click of its own
        return f"{' '.join(arguments)}: {error}"
    return None


def test_shell_lines_can_be_typed() -> None:
    found = {page: commands(text) for page, text in every_page().items()}
    assert {"make demo", "make test"} <= set(found["README.md"]), "README.md names the two commands that do everything"
    assert sum(line.startswith("gradstow ") for page in found.values() for line in page) >= 10
    assert not [why for page in found.values() for line in page if (why := refusal(line))]


def test_commands_in_sentences_exist() -> None:
    """In a sentence a command may stand without its arguments."""
    said = {
        line
        for text in every_page().values()
        for line in inline(text)
        if re.match(r"(make|gradstow|python) [^|]+$", line)
    }
    assert len(said) > 10
    assert not [why for line in said if (why := refusal(line)) and ": Missing " not in why]


def test_links_lead_somewhere() -> None:
    pages = [*documents(), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    assert not {name(page): found for page in pages if (found := broken_links(page))}


def test_files_in_sentences_exist() -> None:
    pages = every_page()
    pages.pop("docs/design.md")  # names folders that are still to come
    said = {
        line for text in pages.values() for line in inline(text) if re.fullmatch(r"(benchmarks|docs|tests)/\S+", line)
    }
    tests = {line for line in inline(pages["docs/faq.md"]) if re.fullmatch(r"test_\w+\.py", line)}
    assert len(said) > 10
    assert len(tests) > 15
    assert not {line for line in said if not (ROOT / line).exists()}
    assert not {line for line in tests if not (ROOT / "tests" / "cases" / line).exists()}


def test_faults_in_shell_and_links_are_seen(tmp_path: Path) -> None:
    shell = "```sh\n$ make tset  # all\ngradstow plna x \\\n  --batch 1\ngradstow plan x --bacth 1\n```\n"
    text = f"Type `make dmo`.\n\n{shell}"
    assert commands(text) == ["make tset", "gradstow plna x    --batch 1", "gradstow plan x --bacth 1"]
    assert all(refusal(line) for line in [*commands(text), *inline(text), "python benchmarks/nothing.py"])
    assert shell_lines("# nothing\n\n$ ls  # all\n") == ["ls"]
    assert refusal("gradstow bench strategies x --batch 1") is None
    assert refusal("gradstow plan x --batch many")
    assert refusal("gradstow bench nothing")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](b.md) ![c](page.md#d) [e](https://f) `[g](h)` [i](#j)\n\n```sh\n[k](l)\n```\n", encoding="utf-8"
    )
    assert broken_links(page) == ["b.md"]


# -------------------------------------------------------------------------------------- figures


@cache
def results(file: str) -> list[list[str]]:
    with (RESULTS / file).open(newline="", encoding="utf-8") as lines:
        return [list(row.values()) for row in csv.DictReader(lines)]


def unmeasured(text: str) -> list[str]:
    """Figures that the results do not hold.

    Numbers of a row of a table must stand in one row of the CSV file that the row, or the paragraph above it, names.
    Those with a point in a paragraph must stand anywhere in a file that it names. A row with MiB needs such a file.
    """
    wrong, source = [], ""
    for paragraph in re.sub(r"```.*?```", "", text, flags=re.S).split("\n\n"):
        named = re.findall(r"`(?:benchmarks/results/)?(\w+\.csv)`", paragraph)
        if not paragraph.startswith("|"):
            source = named[-1] if named else ""
            wrong += [n for n in _prose(paragraph, named) if named]
            continue
        for line in paragraph.splitlines()[2:]:
            own = re.findall(r"`(\w+\.csv)`", line)
            file = own[0] if own else source
            figures = numbers(re.sub(r"`[^`]*`", "", line))
            if file and (RESULTS / file).exists():
                if figures and not any(all(any(agrees(f, v) for v in row) for f in figures) for row in results(file)):
                    wrong.append(f"{file}: {line}")
            elif "MiB" in line:
                wrong.append(f"no source: {line}")
    return wrong


def _prose(paragraph: str, files: list[str]) -> list[str]:
    figures = [n for n in numbers(re.sub(r"`[^`]*`", "", paragraph)) if "." in n]
    values = [value for file in files for row in results(file) for value in row]
    return [f"{files}: {figure}" for figure in figures if not any(agrees(figure, value) for value in values)]


def test_figures_are_measured() -> None:
    pages = every_page()
    pages.pop("docs/design.md")  # tells what was found on the way, too
    assert not {page: wrong for page, text in pages.items() if (wrong := unmeasured(text))}


def test_figures_that_are_not_measured_are_seen() -> None:
    head = "From `benchmarks/results/step_table.csv`:\n\n| model | peak |\n|---|---|\n"
    assert unmeasured(f"{head}| ResNet-50, 8 | 562.7 | 1.02 |\n") == []
    assert (
        len(unmeasured(f"{head}| ResNet-50, 8 | 562.8 |\n| ResNet-50, 4 | 562.7 |\n| ResNet-50, 8 | 562.7 | 1.03 |\n"))
        == 3
    )
    assert len(unmeasured("|a|b|\n|---|---|\n| 1 | 2 MiB |\n| `step_table.csv` | 12345 MiB |\n")) == 2
    assert unmeasured("In `step_table.csv` it is 562.7 and 562.8.") == ["['step_table.csv']: 562.8"]


def test_the_zoo_is_counted() -> None:
    text = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    said = re.search(r"trains (\d+) models .*\s(\d+) are equal and within", text, re.S)
    with (RESULTS / "zoo.csv").open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    good = [row for row in rows if row["equal"] == row["within"] == "yes"]
    assert said
    assert said.groups() == (str(len(rows)), str(len(good))), "docs/limits.md, the last section"


# ----------------------------------------------------------------------------------------- site


def test_every_public_name_has_its_entry() -> None:
    entries = set(re.findall(r"^::: gradstow\.(\w+)", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.M))
    assert entries == set(gradstow.__all__) - {"__version__"}


def test_the_pages_build_strictly(tmp_path: Path) -> None:
    """Links between pages, anchors and names of the API, as mkdocs sees them."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    assert 'id="gradstow.stow"' in page
    loaded = [
        url
        for file in (tmp_path / "site").glob("*.html")
        for url in re.findall(r'(?:src|href)="(https?:[^"]+)"', file.read_text("utf-8"))
    ]
    assert set(loaded) <= {"https://squidfunk.github.io/mkdocs-material/"}, "nothing is loaded from the network"
