"""What is a budget and what is not."""

from __future__ import annotations

import math

import pytest

from gradstow._units import Budget, format_bytes, format_seconds, parse_budget
from gradstow.errors import BudgetError, GradstowError

GOOD: list[tuple[object, Budget]] = [
    (1, Budget(total_bytes=1)),
    (6 * 2**30, Budget(total_bytes=6 * 2**30)),
    ("6GiB", Budget(total_bytes=6 * 2**30)),
    ("6gib", Budget(total_bytes=6 * 2**30)),
    ("  6 GiB ", Budget(total_bytes=6 * 2**30)),
    ("1.5GiB", Budget(total_bytes=3 * 2**29)),
    (".5KiB", Budget(total_bytes=512)),
    ("2.KiB", Budget(total_bytes=2048)),
    ("+2KiB", Budget(total_bytes=2048)),
    ("800MB", Budget(total_bytes=800_000_000)),
    ("1TB", Budget(total_bytes=10**12)),
    ("1TiB", Budget(total_bytes=2**40)),
    ("12B", Budget(total_bytes=12)),
    ("60%", Budget(percent=60.0)),
    ("60 %", Budget(percent=60.0)),
    ("62.5%", Budget(percent=62.5)),
    ("150%", Budget(percent=150.0)),
    ("auto", Budget(auto=True)),
    (" Auto ", Budget(auto=True)),
    (Budget(percent=50.0), Budget(percent=50.0)),
]
BAD: list[tuple[object, str]] = [
    (0, "not a positive number"),
    (-1, "not a positive number"),
    (0.5, "is a float"),
    (0.0, "is a float"),
    (1e9, "is a float"),
    (math.nan, "is a float"),
    (math.inf, "is a float"),
    (-math.inf, "is a float"),
    (True, "cannot be bool"),
    (False, "cannot be bool"),
    (None, "cannot be NoneType"),
    (b"6GiB", "cannot be bytes"),
    ([1], "cannot be list"),
    ("", "cannot be read"),
    ("   ", "cannot be read"),
    ("GiB", "cannot be read"),
    ("0.5", "has no unit"),
    ("1000000000", "has no unit"),
    ("2 GX", "unknown unit 'gx'"),
    ("2 G", "unknown unit 'g'"),
    ("2 gigabytes", "unknown unit"),
    ("-1GiB", "not a positive number"),
    ("0GiB", "not a positive number"),
    ("0%", "not a positive number"),
    ("-5%", "not a positive number"),
    ("nan%", "not a positive number"),
    ("inf GiB", "not a positive number"),
    ("nan GiB", "not a positive number"),
    ("1e9", "cannot be read"),
    ("1,5GiB", "cannot be read"),
    ("1_000B", "cannot be read"),
    ("6GiB!", "cannot be read"),
    ("%60", "cannot be read"),
    ("60%%", "cannot be read"),
    ("0.1B", "less than one byte"),
    ("automatic", "cannot be read"),
]


@pytest.mark.parametrize(("given", "expected"), GOOD)
def test_budgets(given: object, expected: Budget) -> None:
    assert parse_budget(given) == expected


@pytest.mark.parametrize(("given", "reason"), BAD)
def test_what_is_no_budget(given: object, reason: str) -> None:
    with pytest.raises(BudgetError, match=reason) as caught:
        parse_budget(given)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, GradstowError)
    assert "6GiB" in str(caught.value), "the message ends with what to write"


@pytest.mark.parametrize(
    ("budget", "text"), [("6GiB", "6442450944 B"), ("62.5%", "62.5%"), ("auto", "auto"), (7, "7 B")]
)
def test_a_budget_as_text_reads_back(budget: object, text: str) -> None:
    parsed = parse_budget(budget)
    assert str(parsed) == text
    assert parse_budget(text) == parsed


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (-2048, "-2.0 KiB"),
        (488843776, "466.2 MiB"),
        (6 * 2**30, "6.0 GiB"),
        (2**40, "1.00 TiB"),
        (3 * 2**50, "3072.00 TiB"),
    ],
)
def test_bytes_as_text(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 µs"), (12e-6, "12 µs"), (0.0123, "12.3 ms"), (1.0, "1.00 s"), (75.5, "75.50 s")]
)
def test_seconds_as_text(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
