"""Bytes are ``int`` and time is ``float`` seconds everywhere; this file alone turns them to and from text."""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass

from gradstow._errors import BudgetError

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_REMEDY = 'Write bytes as an int, or text such as "6GiB", "800MB", "60%" or "auto".'


@dataclass(frozen=True, slots=True)
class Budget:
    """What the user allows: exactly one of the three fields is set.

    Attributes:
        total_bytes: bound on all live bytes of training on the device.
        percent: bound on the step peak, as a percentage of plain PyTorch's step peak.
        auto: take the device's free memory.
    """

    total_bytes: int | None = None
    percent: float | None = None
    auto: bool = False

    def __str__(self) -> str:
        if self.auto:
            return "auto"
        if self.percent is not None:
            return f"{self.percent:g}%"
        return f"{self.total_bytes} B"


def whole_number(value: object) -> int | None:
    """The value as an int where it is a whole number of any kind (Python's, NumPy's, a tensor's), else None."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # such as a tensor with several numbers
        return None


def parse_budget(value: object) -> Budget:
    """Read a budget: ``int`` bytes, text with a unit, a percentage, or ``"auto"``.

    Raises:
        BudgetError: for zero, negative, NaN, a bare fraction, an unknown unit or another type.
    """
    if isinstance(value, Budget):
        return value
    number_of_bytes = whole_number(value)
    if number_of_bytes is not None:
        if number_of_bytes <= 0:
            raise BudgetError(f"the budget {value} is not a positive number of bytes. {_REMEDY}")
        return Budget(total_bytes=number_of_bytes)
    if isinstance(value, bool) or not isinstance(value, (float, str)):
        raise BudgetError(f"a budget cannot be {type(value).__name__} {value!r}. {_REMEDY}")
    if isinstance(value, float):
        raise BudgetError(f"the budget {value!r} is a float, which could mean a fraction or bytes. {_REMEDY}")
    text = value.strip().lower()
    if text == "auto":
        return Budget(auto=True)
    match = re.fullmatch(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+|nan|inf))\s*([a-z]*|%)", text)
    if match is None:
        raise BudgetError(f"the budget {value!r} cannot be read. {_REMEDY}")
    number, unit = float(match[1]), match[2]
    if not math.isfinite(number) or number <= 0:
        raise BudgetError(f"the budget {value!r} is not a positive number. {_REMEDY}")
    if unit == "%":
        return Budget(percent=number)
    if unit == "":
        raise BudgetError(f"the budget {value!r} has no unit. {_REMEDY}")
    if unit not in _UNITS:
        known = ", ".join(("B", "KiB", "MiB", "GiB", "TiB", "KB", "MB", "GB", "TB"))
        raise BudgetError(f"the budget {value!r} has the unknown unit {unit!r}; known are {known}. {_REMEDY}")
    total = int(number * _UNITS[unit])
    if total <= 0:
        raise BudgetError(f"the budget {value!r} is less than one byte. {_REMEDY}")
    return Budget(total_bytes=total)


def format_bytes(count: int) -> str:
    """Bytes as text in binary units, such as ``"466.2 MiB"``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def format_seconds(seconds: float) -> str:
    """Seconds as text in the unit that reads best, such as ``"12.3 ms"``."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} µs"
