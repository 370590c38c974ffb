"""What users may ask for: a named strategy, rules, or both; and the classic strategies as kept sets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gradstow._errors import PolicyError
from gradstow.planner._problem import Problem
from gradstow.planner._rules import ACTIONS, HOW, Rules, close, in_family, is_broken

POLICIES = ("auto", "store-all", "recompute-all", "sqrt", "selective")
_EXPENSIVE = ("conv", "matmul", "attention")  # what "selective" stores


@dataclass(frozen=True)
class Policy:
    """Which values to store and which to recompute, as far as the user says.

    ``name`` decides where no rule does. A rule is (pattern, action): the pattern a family of ops (``"conv2d"``,
    ``"relu"``, ``"batchnorm"``, ``"linear"``, ``"attention"``, ...), any aten name, or a glob over module paths
    (``"layer3.*"``); the action ``"store"``, ``"recompute"``, ``"compress"`` (a smaller exact form where there is
    one), a code that is not exact (``"bf16"``, ``"fp8"``, ``"int8"``, ``"int4"``, ``"int2"``), or ``"offload"``. Later
    rules win.

    Raises:
        PolicyError: an unknown name or action, with the closest known ones.
    """

    name: str = "auto"
    rules: Rules = ()

    def __post_init__(self) -> None:
        if self.name not in POLICIES:
            rule = f' As a rule for everything it is "*={self.name}".' if self.name in ACTIONS else ""
            raise PolicyError(f"there is no policy {self.name!r}.{close(self.name, POLICIES)}{rule} {HOW}")
        for pattern, action in self.rules:
            if not isinstance(pattern, str) or not pattern.strip():
                raise PolicyError(f"the pattern {pattern!r} names nothing. {HOW}")
            if is_broken(pattern):
                raise PolicyError(f"the pattern {pattern!r} has a [ without its ], so it is no glob. {HOW}")
            if action not in ACTIONS:
                raise PolicyError(
                    f"the rule for {pattern!r} says {action!r}, which is no action.{close(str(action), ACTIONS)} {HOW}"
                )

    @staticmethod
    def of(policy: str | Mapping[str, str] | Policy) -> Policy:
        """From a name, from rules as a mapping, or from a policy's own text."""
        if isinstance(policy, Policy):
            return policy
        if isinstance(policy, Mapping):
            return Policy(rules=tuple(policy.items()))
        if not isinstance(policy, str):
            raise PolicyError(f"a policy is text or a mapping, not {type(policy).__name__}. {HOW}")
        names: list[str] = []
        rules = []
        for part in (p.strip() for p in policy.split(",")):
            pattern, equals, action = part.partition("=")
            if equals:
                rules.append((pattern.strip(), action.strip()))
            elif part not in names:
                names.append(part)
        if len(names) > 1:
            raise PolicyError(f"the policy {policy!r} has two names, {names[0]} and {names[1]}. Give one. {HOW}")
        return Policy(names[0] if names else "auto", tuple(rules))

    def __str__(self) -> str:
        parts = [f"{pattern}={action}" for pattern, action in self.rules]
        return ",".join([self.name, *parts] if self.name != "auto" or not parts else parts)


def kept_by_policy(problem: Problem, name: str) -> set[int]:
    """Storages that a named policy keeps (those that no op can make again come on top)."""
    if name in ("store-all", "auto"):
        return problem.keepable - problem.never - _decoded(problem)
    if name == "recompute-all":
        return set()
    if name == "selective":
        regions = problem.graph.regions
        ops = {id(n): (regions[n.region], regions[n.region].ops[n.op]) for n in problem.forward}
        nodes = [n for n in problem.forward if any(in_family(*ops[id(n)], family) for family in _EXPENSIVE)]
        return {s for node in nodes for s in node.outputs} - problem.never
    narrow = narrow_points(problem)
    return set(_spread(problem, narrow, math.isqrt(max(len(narrow), 1)) or 1)) - problem.never


def _decoded(problem: Problem) -> set[int]:
    """What is made of a smaller thing that can be kept in its place."""
    coded = {s for index in problem.lazy for s in problem.forward[index].outputs}
    return {
        s for index in problem.lazy for s in problem.forward[index].outputs if coded & {*problem.forward[index].inputs}
    }


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
