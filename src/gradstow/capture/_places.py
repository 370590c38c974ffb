"""Where in the user's code a node of a graph comes from."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import fx

_OURS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)


def is_users(file: str) -> bool:
    """Whether a file is neither torch's nor ours."""
    return not file.startswith((_TORCH, _OURS))


def module_path(node: fx.Node) -> str:
    """The module that the node belongs to, as the captured function spells it."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])  # such as L['module'].layer1._modules['0'].conv1
    path = re.sub(r"^L\['\w+'\]\.?", "", path).replace("._modules", "")
    return re.sub(r"\['([^']*)'\]", r".\1", path).strip(".")


def source_line(node: fx.Node) -> str:
    """``file.py:line`` of the innermost line that made the node."""
    places = _places(node)
    return _short(*places[-1]) if places else ""


def user_line(node: fx.Node) -> str:
    """``file.py:line`` of the innermost line outside of torch that made the node."""
    places = _places(node)
    own = [place for place in places if is_users(place[0])]
    return _short(*(own or places)[-1]) if places else ""


def user_frame(stack: Sequence[traceback.FrameSummary]) -> str:
    """``file.py:line`` of the innermost frame outside of torch and of us, or ""."""
    own = [f for f in stack if is_users(f.filename)]
    return _short(own[-1].filename, str(own[-1].lineno)) if own else ""


def _places(node: fx.Node) -> list[tuple[str, str]]:
    found = re.findall(r'^\s*File "([^"]*)", line (\d+)', node.meta.get("stack_trace") or "", re.MULTILINE)
    return [(file, line) for file, line in found if not file.startswith(_OURS)]


def _short(file: str, line: str) -> str:
    return f"{file.rsplit('/', 1)[-1]}:{line}"
