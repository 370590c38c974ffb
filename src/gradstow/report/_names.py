"""Names as a reader knows them: operators without overloads, module paths without the capture's wrapper."""

from __future__ import annotations


def short_target(target: str) -> str:
    """``"aten.convolution.default"`` → ``"convolution"``; what is no operator stays as it is."""
    parts = target.split(".")
    return parts[1] if len(parts) == 3 else target


def module_path(path: str) -> str:
    """The path as ``named_modules`` spells it: the captured function's argument in front of it is cut off."""
    return "" if path == "module" else path.removeprefix("module.")
