"""Which systems are compared: peers with their settings, and gradstow at the peaks that they reach."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from peers import _ways
from peers._ways import Way

KINDS = ("eager", "compiled")
OURS = {"eager": "gradstow eager", "compiled": "gradstow inductor"}
CODEGEN = {"gradstow eager": "eager", "gradstow inductor": "inductor"}
COMPILE = "torch.compile"
BUDGETS = (0.75, 0.5, 0.25, 0.1)
SOLVERS = ("dp", "ilp")
SMALLEST = "smallest"
SAME = 1.01  # peaks that are as near as this get one plan
_MIB = 1 << 20

Key = tuple[str, str]  # peer, setting


@dataclass(frozen=True)
class Job:
    """One system on one model, in a process of its own. ``budget`` is a step peak in bytes, 0 for the smallest."""

    model: str
    peer: str
    setting: str
    kind: str
    rounds: int = 5
    device: str = "cpu"
    threads: int = 0
    budget: int | None = None

    @property
    def key(self) -> Key:
        return self.peer, self.setting


EAGER: dict[Key, Way] = {
    ("plain", ""): _ways.nothing,
    ("checkpoint", "every block"): _ways.every_block,
    ("checkpoint", "every second block"): partial(_ways.every_block, step=2),
    ("checkpoint_sequential", "sqrt(n) segments"): _ways.sqrt_segments,
    ("selective", "products and convolutions"): _ways.selective,
    ("torch_remat", "by hand"): _ways.remat,
    ("own switch", "on"): _ways.own_switch,
}
COMPILED: dict[Key, Way] = {
    (COMPILE, ""): _ways.compiled,
    **{
        (COMPILE, f"budget {budget:g} {solver}"): partial(_ways.compiled, budget=budget, solver=solver)
        for solver in SOLVERS
        for budget in BUDGETS
    },
    (COMPILE, "budget 0"): partial(_ways.compiled, budget=0.0),  # no solver is asked there
    (COMPILE, "checkpoint every block"): partial(_ways.compiled, first=_ways.every_block),
}
WAYS = {"eager": EAGER, "compiled": COMPILED}
ORDER = [*EAGER, *COMPILED]


def peers_of(model: str, kind: str, **options: Any) -> list[Job]:
    return [Job(model, peer, setting, kind, **options) for peer, setting in WAYS[kind]]


def ours_of(model: str, kind: str, rows: Iterable[Mapping[str, Any]], **options: Any) -> list[Job]:
    """gradstow at the peaks that the model's peers of this kind have reached, and at its smallest."""
    jobs = [
        Job(model, OURS[kind], f"at {name}", kind, budget=peak, **options)
        for name, peak in targets(row for row in rows if row["model"] == model and row["kind"] == kind)
    ]
    return [*jobs, Job(model, OURS[kind], SMALLEST, kind, budget=0, **options)]


def targets(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """(name, step peak in bytes), from the smallest on. Nearly equal ones are one target: the smaller, for both."""
    found: list[tuple[str, int]] = []
    reached = [row for row in rows if row["outcome"] == "measured" and row["peer"] not in CODEGEN]
    for row in sorted(reached, key=lambda row: float(row["peak_mib"])):
        peak = round(float(row["peak_mib"]) * _MIB)
        if not found or peak > SAME * found[-1][1]:
            found.append((label(row["peer"], row["setting"]), peak))
    return found


def label(peer: str, setting: str) -> str:
    return f"{peer} {setting}".strip()
