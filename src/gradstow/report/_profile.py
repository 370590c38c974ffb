"""A profile as data: what fills memory at the peak and over the step, plain and planned, predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradstow.ir import PlanData
from gradstow.report._frontier import frontier_json
from gradstow.report._json import plan_json
from gradstow.report._snapshot import PARTS, Held, Story
from gradstow.report._tree import module_tree


@dataclass(frozen=True, slots=True)
class Measured:
    """One real step; bytes.

    Attributes:
        step_peak_bytes: above what was resident; ``peak_bytes`` is all of training at the worst moment, with
            ``optimizer.step`` where an optimizer was given.
        rss_peak_bytes: growth of the process's resident set in the step; None where the system cannot tell.
        saved: bytes that autograd saved for the backward, by the module that made them; empty for a planned step.
        timeline: (seconds, bytes above what was resident) in time order; empty on CUDA.
    """

    step_peak_bytes: int
    peak_bytes: int
    rss_peak_bytes: int | None = None
    saved: Mapping[str, int] | None = None
    timeline: Sequence[tuple[float, int]] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "step_peak_bytes": self.step_peak_bytes,
            "peak_bytes": self.peak_bytes,
            "rss_peak_bytes": self.rss_peak_bytes,
            "saved": None if self.saved is None else dict(self.saved),
        }


def saved_by_module(plan: PlanData) -> dict[str, int]:
    """Predicted bytes that plain PyTorch saves for the backward, by the module that makes them."""
    story, found = Story(plan, plain=True), dict[str, int]()
    for life in story.timeline.lives:
        if story.saved(life):
            name = story.held(life).module
            found[name] = found.get(name, 0) + story.nbytes(life)
    return found


def profile_json(
    plan: PlanData,
    weights: Sequence[Held],
    measured: Mapping[str, Measured],
    plans: Sequence[PlanData] = (),
    proven_step_peak_bytes: int = 0,
) -> dict[str, Any]:
    """Everything that the page shows, for ``json.dumps``."""
    stories = {"plain": Story(plan, plain=True, weights=weights), "planned": Story(plan, plain=False, weights=weights)}
    peaks = {name: story.peak() for name, story in stories.items()}
    return {
        "parts": PARTS,
        "plan": {**plan_json(plan), "step_budget_bytes": plan.step_budget_bytes},
        "peaks": {name: peak.to_json() for name, peak in peaks.items()},
        "modules": {name: module_tree(peak.rows).to_json() for name, peak in peaks.items()},
        "ops": {name: peak.by("op") for name, peak in peaks.items()},
        "lines": {name: peak.by("source") for name, peak in peaks.items()},
        "saved": saved_by_module(plan),
        "timelines": {name: timeline_json(story) for name, story in stories.items()},
        "measured": {name: one.to_json() for name, one in measured.items()},
        "frontier": frontier_json(plans, proven_step_peak_bytes) if plans else None,
    }


def timeline_json(story: Story) -> dict[str, Any]:
    """Columns, one entry per moment; each text is there once, in ``texts``, and moments have its number."""
    levels, texts = story.levels(), dict[str, int]()
    used = [part for part in PARTS if any(level.parts[part] for level in levels)]
    lives = [
        {
            "name": held.name,
            "bytes": held.nbytes,
            "part": held.part,
            "module": held.module,
            "first": life.first,
            "last": life.last,
        }
        for life, held in ((life, story.held(life)) for life in story.timeline.lives)
    ]
    return {
        "seconds": [round(level.seconds, 9) for level in levels],
        "bytes": [level.nbytes for level in levels],
        "parts": {part: [level.parts[part] for level in levels] for part in used},
        "at": [texts.setdefault(str(level.at), len(texts)) for level in levels],
        "texts": list(texts),
        "lives": lives,
    }
