"""Ways to keep a value as something else, as data. The operators are in ``_lossy`` and ``offload``."""

from __future__ import annotations

from dataclasses import dataclass

GROUP = 128  # neighbours that share statistics


@dataclass(frozen=True, slots=True)
class Code:
    """A way to keep floats in fewer bytes.

    Attributes:
        bits: for each number.
        statistics: numbers that each group keeps beside them.
        bound: the largest error is this part of the group's range (integers), or of the number itself (floats).
    """

    bits: int
    statistics: int
    bound: float

    @property
    def levels(self) -> int:
        """The highest number of an integer code."""
        return (1 << self.bits) - 1

    @property
    def of_range(self) -> bool:
        return self.statistics == 2

    def __str__(self) -> str:
        whole = f"the range of {GROUP} neighbours" if self.of_range else "itself"
        return f"error at most 1/{round(1 / self.bound)} of {whole}"


CODES = {
    "int2": Code(2, 2, 1 / 3),
    "int4": Code(4, 2, 1 / 15),
    "fp8": Code(8, 1, 1 / 8),
    "int8": Code(8, 2, 1 / 255),
    "bf16": Code(16, 0, 1 / 256),
}  # fewest bytes first

EXACT = {"sparse": "numbers that are not zero, and a bit for each"}
PLACES = {"disk": "in a file", "host": "in host memory"}


def is_place(code: str) -> bool:
    """Whether values go elsewhere: ``"disk"``, ``"disk:/path"``."""
    return code.partition(":")[0] in PLACES


def about(code: str) -> str:
    """What a code does to a value, in words."""
    return f"{code}, {CODES[code]}" if code in CODES else {**EXACT, **PLACES}[code]
