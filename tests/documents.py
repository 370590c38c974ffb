"""Markdown documents read as what they promise: code blocks, shell lines, links and figures; and a way to run the code.

A code block that cannot run here (needs a GPU, a download) has ``<!-- not run: reason -->`` directly above it. A shell
block with ``<!-- run -->`` above it has its ``gradstow`` lines run. A Python block that begins with ``# name.py`` is
also saved as that file, for such lines.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUNNER = Path(__file__).with_name("document_runner.py")
FENCE = re.compile(
    r"^(?:<!-- (?P<mark>run|not run)(?:: (?P<reason>[^\n]+?))? -->\s*\n)?"
    r"```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^```$",
    re.M | re.S,
)
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)|(?:src|href)=\"([^\"]+)\"")
SHELLS = ("bash", "console", "sh", "shell")
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")


@dataclass(frozen=True)
class Block:
    """One fenced block; ``mark`` is "run", "not run" or empty."""

    language: str
    body: str
    mark: str = ""

    @property
    def file(self) -> str | None:
        """The file that a Python block says it is."""
        found = re.match(r"# (\w+\.py)\n", self.body)
        return found[1] if found and self.language == "python" else None


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text: str, *languages: str) -> list[Block]:
    """Fenced blocks in these languages, or all."""
    found = [Block(m["language"], m["body"], m["mark"] or "") for m in FENCE.finditer(text)]
    return [block for block in found if not languages or block.language in languages]


def steps(text: str) -> list[Block]:
    """What runs of a document, in order."""
    return [
        block
        for block in blocks(text)
        if (block.language == "python" and block.mark != "not run")
        or (block.language in SHELLS and block.mark == "run")
    ]


def shell_lines(body: str) -> list[str]:
    """Commands without prompt and comment; one that goes on behind a backslash is one."""
    lines = (re.sub(r"^\$ ", "", line) for line in body.replace("\\\n", " ").splitlines())
    return [line for line in (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines) if line]


def commands(text: str) -> list[str]:
    """Every line of the shell blocks."""
    return [line for block in blocks(text, *SHELLS) for line in shell_lines(block.body)]


def inline(text: str) -> list[str]:
    """Code inside of sentences."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


def broken_links(path: Path) -> list[str]:
    """Relative links, pictures included, that lead to no file."""
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", path.read_text(encoding="utf-8")))
    links = [a or b for a, b in LINK.findall(text)]
    local = [link for link in links if not re.match(r"[a-z]+:|#", link)]
    return [link for link in local if not (path.parent / link.partition("#")[0]).exists()]


def numbers(text: str) -> list[str]:
    return NUMBER.findall(text)


def agrees(figure: str, value: str) -> bool:
    """Whether a figure in a text is this value of a table, rounded to the figure's own digits, without its sign."""
    try:
        half = 0.5 * 10.0 ** -len(figure.partition(".")[2])
        return abs(abs(float(value)) - float(figure.replace(",", ""))) <= half * (1 + 1e-9)
    except ValueError:  # a value such as "60%" or "resnet50"
        return figure in numbers(value)


def run(folder: Path, pages: dict[str, list[Block]], preamble: str, seconds: int = 500) -> dict[str, str]:
    """Run each page after the preamble, all in one process; gives the failed pages and why they did.

    One process, since importing torch and its compiler takes longer than most pages.
    """
    asked = {
        name: [{**asdict(block), "file": block.file, "lines": shell_lines(block.body)} for block in page]
        for name, page in pages.items()
    }
    (folder / "pages.json").write_text(json.dumps({"preamble": preamble, "pages": asked}), encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, str(RUNNER), "pages.json", "failed.json"],
        env=env,
        capture_output=True,
        text=True,
        timeout=seconds,
        cwd=folder,  # what an example saves does not land in the checkout
    )
    if done.returncode != 0:
        return {"the process": done.stderr}
    return dict(json.loads((folder / "failed.json").read_text(encoding="utf-8")))
