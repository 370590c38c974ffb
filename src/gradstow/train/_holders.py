"""Who holds an object: names for people, found by walking referrers. Slow, and only for when something is wrong."""

from __future__ import annotations

import gc
import inspect
import sys
import types
from collections import deque
from typing import Any

_FARTHEST = 6  # steps from the object to what has a name
_MOST = 400  # objects looked at
_CONTAINERS = (list, tuple, set, frozenset, deque, dict)
_OWN = 3  # references to the copy of a frame's variables: the frame, the reader, and the count itself
_NO_HOLDERS = (types.FrameType, type, types.ModuleType)


def name_holder(item: object) -> str:
    """Such as "the list `losses` in train() (train.py:12), 40 items"; "" where nothing with a name holds it."""
    variables = _variables()
    level: list[object] = [item]
    seen = {id(item)}
    for _ in range(_FARTHEST):
        following: list[object] = []
        for here in level:
            if id(here) in variables:
                name, where = variables[id(here)]
                return f"{_called(here, name)} in {where}{_size(here)}"
        for here in level:
            for holder in gc.get_referrers(here):
                if id(holder) in seen or holder is level or holder is following or isinstance(holder, _NO_HOLDERS):
                    continue
                found = _place_in(holder, here)
                if found:
                    return found
                seen.add(id(holder))
                following.append(holder)
                if len(seen) > _MOST:
                    return ""
        level = following
    return ""


def _variables() -> dict[int, tuple[str, str]]:
    """id → name and place, of the variables of running functions outside of gradstow and torch: these have no
    referrers. Inner functions go first."""
    found: dict[int, tuple[str, str]] = {}
    frame = sys._getframe(1) if hasattr(sys, "_getframe") else None
    while frame is not None:
        code, package = frame.f_code, str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("gradstow", "torch") and code.co_flags & inspect.CO_OPTIMIZED:
            where = f"{code.co_name}() ({_short(code.co_filename)}:{frame.f_lineno})"
            for name, key in _names(frame):
                found.setdefault(key, (name, where))
        frame = frame.f_back
    return found


def _names(frame: types.FrameType) -> list[tuple[str, int]]:
    variables = frame.f_locals
    names = [(str(name), id(value)) for name, value in variables.items()]
    # up to Python 3.12 this is a copy that the frame keeps, and with it all that the variables hold
    if type(variables) is dict and sys.getrefcount(variables) <= _OWN:
        variables.clear()
    return names


def _place_in(holder: object, item: object) -> str:
    """The item's name in what holds it: a module of Python, an instance or a closure."""
    if isinstance(holder, dict):
        name = next((str(n) for n, v in list(holder.items()) if v is item), "")
        if "__name__" in holder and "__builtins__" in holder:
            return f"{_called(item, name)} of the module {holder['__name__']}{_size(item)}"
        for owner in gc.get_referrers(holder):
            if not isinstance(owner, _CONTAINERS) and getattr(owner, "__dict__", None) is holder:
                return _of(owner, name, item)
        return ""
    if isinstance(holder, types.CellType):
        functions = (f for t in gc.get_referrers(holder) if isinstance(t, tuple) for f in gc.get_referrers(t))
        name = next((f.__qualname__ for f in functions if isinstance(f, types.FunctionType)), "")
        return f"{_called(item, '')} in the closure of {name}(){_size(item)}" if name else ""
    if isinstance(holder, _CONTAINERS):
        return ""
    name = next((n for n, v in _attributes(holder) if v is item), "")
    return _of(holder, name, item) if name else ""


def _of(owner: object, name: str, item: object) -> str:
    kind = type(owner).__name__
    if isinstance(owner, type):
        return f"{_called(item, name)} of the class {owner.__qualname__}{_size(item)}"
    return f"{_called(item, name)} of {'an' if kind[:1].upper() in 'AEIOU' else 'a'} {kind}{_size(item)}"


def _attributes(owner: object) -> list[tuple[str, Any]]:
    found = list(getattr(owner, "__dict__", {}).items())
    for kind in type(owner).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else tuple(slots)
        found += [(n, getattr(owner, n)) for n in names if n not in ("__dict__", "__weakref__") and hasattr(owner, n)]
    return found


def _called(item: object, name: str) -> str:
    kind = type(item).__name__ if isinstance(item, _CONTAINERS) else "variable"
    return f"the {kind} `{name}`" if name else f"a {kind}"


def _size(item: object) -> str:
    return f", {len(item)} items" if isinstance(item, _CONTAINERS) else ""


def _short(path: str) -> str:
    return path.replace("\\", "/").rpartition("/")[2]
