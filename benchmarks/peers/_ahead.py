"""Who is ahead where, by how much: each peer against gradstow in no more memory, code of the same kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peers._settings import CODEGEN, KINDS, label

US, PEER, EVEN = "gradstow", "peer", "even"
_WITHIN = 1.005  # what counts as the same memory; what is over its budget is listed
_ABSENT = ("not applicable", "not installed")
_HEAD = ("model", "kind", "peer", "MiB", "time", "numbers", "gradstow MiB", "time", "numbers", "ahead", "by")


@dataclass(frozen=True)
class Point:
    """What one system reaches: a step peak in MiB, and its time as a multiple of plain eager's."""

    name: str
    peak: float
    ratio: float
    low: float
    high: float
    numbers: str = ""

    @staticmethod
    def of(row: Mapping[str, Any]) -> Point:
        peak, *ratios = (float(row[name]) for name in ("peak_mib", "ratio", "ratio_low", "ratio_high"))
        return Point(label(row["peer"], row["setting"]), peak, *ratios, numbers=_numbers(row))

    @property
    def time(self) -> str:
        return f"×{self.ratio:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Verdict:
    """A peer against gradstow's fastest step in no more memory; None where gradstow has none so small."""

    model: str
    kind: str
    peer: Point
    ours: Point | None

    @property
    def ahead(self) -> str:
        if self.ours is None or self.peer.high < self.ours.low:
            return PEER
        return US if self.ours.high < self.peer.low else EVEN

    @property
    def by(self) -> str:
        if self.ours is None:
            return "nothing as small"
        return f"{100 * (self.peer.ratio / self.ours.ratio - 1):+.0f} % time"


def _numbers(row: Mapping[str, Any]) -> str:
    """What is known of loss and gradients, and of buffers."""
    if row.get("equal"):
        buffers = "" if row.get("buffers_equal") != "no" else ", not buffers"  # statistics that are updated twice
        return f"equal{buffers}" if row["equal"] == "yes" else "DIFFERENT"
    return f"error ×{float(row['error_ratio']):.2f}" if row.get("error_ratio") else ""


def verdicts(rows: Iterable[Mapping[str, Any]]) -> list[Verdict]:
    good = [row for row in rows if row["outcome"] == "measured"]
    found = []
    for row in good:
        if row["peer"] in CODEGEN:
            continue
        peer = Point.of(row)
        fit = [p for p in points(good, row["model"], row["kind"], ours=True) if p.peak <= _WITHIN * peer.peak]
        found.append(Verdict(row["model"], row["kind"], peer, min(fit, key=lambda p: p.ratio, default=None)))
    return found


def points(rows: Iterable[Mapping[str, Any]], model: str, kind: str, ours: bool) -> list[Point]:
    chosen = (row for row in rows if row["outcome"] == "measured" and (row["model"], row["kind"]) == (model, kind))
    return [Point.of(row) for row in chosen if (row["peer"] in CODEGEN) == ours]


def smallest(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line per model and kind: the smallest peak of gradstow and of its peers."""
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        for kind in KINDS:
            least = [min(points(rows, model, kind, o), key=lambda p: p.peak, default=None) for o in (True, False)]
            if None in least:
                continue
            ours, theirs = (point for point in least if point is not None)
            part = 100 * (1 - ours.peak / theirs.peak)
            lines.append(
                f"{model}, {kind}: gradstow {ours.peak:.4g} MiB at ×{ours.ratio:.2f}, {theirs.name or 'peer'} "
                f"{theirs.peak:.4g} MiB at ×{theirs.ratio:.2f}: {part:+.0f} % less"
            )
    return lines


def counts(found: Iterable[Verdict]) -> list[str]:
    lines = []
    found = list(found)
    for kind in KINDS:
        tally = Counter(verdict.ahead for verdict in found if verdict.kind == kind)
        if tally:
            lines.append(f"{kind}: gradstow ahead {tally[US]}, even {tally[EVEN]}, peer ahead {tally[PEER]}")
    return lines


def failures(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return [
        f"{row['model']}, {label(row['peer'], row['setting'])}: {row['outcome']}: {row['note']}"
        for row in rows
        if row["outcome"] not in ("measured", *_ABSENT)
    ]


def over(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Plans that were measured above their budget."""
    lines = []
    for row in rows:
        if row["outcome"] == "measured" and row.get("budget_mib"):
            excess = round((float(row["peak_mib"]) - float(row["budget_mib"])) * (1 << 20))
            if excess > 0:
                lines.append(f"{row['model']}, {label(row['peer'], row['setting'])}: {excess} bytes over its budget")
    return lines


def absent(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """What could not be tried, each reason once, with its models."""
    why: dict[str, list[str]] = {}
    for row in rows:
        if row["outcome"] in _ABSENT:
            why.setdefault(f"{label(row['peer'], row['setting'])}: {row['note']}", []).append(row["model"])
    return [f"{reason} ({', '.join(models)})" for reason, models in why.items()]


def _cells(verdict: Verdict) -> tuple[str, ...]:
    ours = verdict.ours
    own = ("", "", "") if ours is None else (f"{ours.peak:.4g}", ours.time, ours.numbers)
    peer = verdict.peer
    system = (verdict.model, verdict.kind, peer.name, f"{peer.peak:.4g}", peer.time, peer.numbers)
    return (*system, *own, verdict.ahead, verdict.by)


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table for a terminal."""
    found = verdicts(rows)
    cells = [_HEAD, *map(_cells, found)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([*lines, "", *counts(found), *smallest(rows), *over(rows), *failures(rows), *absent(rows)])


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    found = verdicts(rows)
    cells = [_HEAD, ("---",) * len(_HEAD), *map(_cells, found)]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in cells]
    parts = [["# Who is ahead where", "", *counts(found), "", *lines]]
    for title, items in (
        ("Smallest peaks", smallest(rows)),
        ("Over the budget", over(rows)),
        ("Failed", failures(rows)),
        ("Not tried", absent(rows)),
    ):
        if items:
            parts.append([f"## {title}", "", *(f"- {item}" for item in items)])
    return "\n\n".join("\n".join(part) for part in parts) + "\n"
