"""Python's random numbers in a captured forward: drawn anew in every step.

Dynamo draws from a ``random.Random`` object while it traces, and writes the object's state down as a constant: every
later step would get the same numbers. While we compile it knows only the object behind ``random.random`` and its like,
which it calls in every step, as it should; at all else the graph breaks, and the real call runs.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from torch._dynamo.exc import Unsupported
from torch._dynamo.variables.misc import RandomVariable

_compiling: ContextVar[bool] = ContextVar("gradstow_compiling", default=False)


@contextlib.contextmanager
def no_frozen_numbers() -> Iterator[None]:
    """What is compiled inside, in this thread, freezes no random state."""
    token = _compiling.set(True)
    try:
        yield
    finally:
        _compiling.reset(token)


def _is_supported(value: Any) -> bool:
    return (value is _SHARED or not _compiling.get()) and _supported(value)


def _call_method(self: RandomVariable, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    if _compiling.get():
        raise Unsupported("Python's random numbers are drawn outside of graphs")
    return _method(self, tx, name, *args, **kwargs)


_SHARED: Any = getattr(random.random, "__self__")  # noqa: B009
_supported, _method = RandomVariable.is_supported_random_obj, RandomVariable.call_method
RandomVariable.is_supported_random_obj = staticmethod(_is_supported)
RandomVariable.call_method = _call_method
