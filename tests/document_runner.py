"""Runs the pages that ``documents.run`` wrote down, in a process of its own: python document_runner.py PAGES FAILED.

Each page has a namespace and a folder of its own; what fails is written down, and the next page goes on.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch


def main() -> None:
    source, target = (Path(name).resolve() for name in sys.argv[1:])
    asked = json.loads(source.read_text(encoding="utf-8"))
    failed = {}
    for number, (name, page) in enumerate(asked["pages"].items()):
        folder = target.parent / f"page{number}"
        folder.mkdir()
        os.chdir(folder)
        if "torch._dynamo" in sys.modules:  # importing it takes seconds
            torch._dynamo.reset()
        start = time.perf_counter()
        try:
            run_page(name, page, asked["preamble"])
        except BaseException:
            failed[name] = traceback.format_exc()
        print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
    target.write_text(json.dumps(failed), encoding="utf-8")


def run_page(name: str, page: list[dict[str, Any]], preamble: str) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(preamble, "the preamble", "exec"), names)
    for number, block in enumerate(page, start=1):
        if block["language"] != "python":
            for line in block["lines"]:
                run_command(line)
            continue
        if block["file"]:
            Path(block["file"]).write_text(block["body"], encoding="utf-8")
        exec(compile(block["body"], f"{name}, Python block {number}", "exec"), names)


def run_command(line: str) -> None:
    """One line of a shell block, where it is ours."""
    from gradstow.cli import main as gradstow

    program, *arguments = shlex.split(line)
    if program == "gradstow":
        code = gradstow(arguments)
        assert code == 0, f"{line} ended with exit code {code}"


if __name__ == "__main__":
    main()
