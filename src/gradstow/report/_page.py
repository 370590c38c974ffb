"""The page: one file that holds its data, its style and its script, and asks the network for nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any


def profile_page(profile: Mapping[str, Any]) -> str:
    """``profile``: as ``profile_json`` makes it."""
    folder = files("gradstow.report") / "page"
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    page = (folder / "page.html").read_text(encoding="utf-8")
    # a name in the model may hold "</script>": no "<" is left in the data
    text = json.dumps(profile, separators=(",", ":")).replace("<", "\\u003c")
    return page.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script).replace("/*DATA*/", text)
