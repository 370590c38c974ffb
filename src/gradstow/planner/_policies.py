"""The classic strategies, as kept sets: baselines to compare with, and ways to ask for them by name."""

from __future__ import annotations

import difflib
import math

from gradstow._errors import PolicyError
from gradstow.planner._problem import Problem

POLICIES = ("auto", "store-all", "recompute-all", "sqrt")


def check_policy(name: str) -> str:
    """The policy's name.

    Raises:
        PolicyError: unknown, with the closest known ones.
    """
    if name in POLICIES:
        return name
    close = difflib.get_close_matches(str(name), POLICIES, n=2) or POLICIES
    raise PolicyError(f"there is no policy {name!r}. Did you mean {' or '.join(close)}?")


def kept_by_policy(problem: Problem, name: str) -> set[int]:
    """Storages that a named policy keeps (those that no op can make again come on top)."""
    if name == "store-all":
        return set(problem.keepable)
    if name == "recompute-all":
        return set()
    narrow = narrow_points(problem)
    return set(_spread(problem, narrow, math.isqrt(max(len(narrow), 1)) or 1))


def narrow_points(problem: Problem) -> list[int]:
    """Storages that alone are alive at some moment of the forward, in order: where it can be cut.

    Crumbs (statistics, counters: under 1/256 of the largest activation) do not count.
    """
    crumb = max((problem.nbytes[s] for n in problem.forward for s in n.outputs), default=0) // 256
    live: set[int] = set()
    found: dict[int, None] = {}
    for node, deaths in zip(problem.forward, problem.deaths, strict=True):
        live.update(s for s in node.outputs if problem.nbytes[s] > crumb and s not in problem.held)
        live -= deaths
        if len(live) == 1:
            found.update(dict.fromkeys(live))
    return list(found)


def _spread(problem: Problem, points: list[int], count: int) -> list[int]:
    """``count`` of the points, so that the forward's seconds between them are about equal."""
    if not points:
        return []
    clock, elapsed = [], 0.0
    for node in problem.forward:
        elapsed += node.seconds
        clock.append(elapsed)
    times = {s: clock[problem.maker[s]] for s in points}
    chosen: list[int] = []
    for k in range(1, count + 1):
        target = elapsed * k / (count + 1)
        nearest = min(points, key=lambda s: abs(times[s] - target))
        if nearest not in chosen:
            chosen.append(nearest)
    return chosen
