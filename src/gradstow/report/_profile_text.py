"""A profile as text: parts at the peak, then modules, ops, lines and the largest tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from gradstow._units import format_bytes
from gradstow.ir import PlanData
from gradstow.report._profile import Measured, saved_by_module
from gradstow.report._snapshot import PARTS, Held, Snapshot, Story
from gradstow.report._summary import batch_text
from gradstow.report._text import WIDTH, common_path, one_line
from gradstow.report._tree import Node, module_tree

_BAR = 30
_SMALL = 0.02  # of the peak: smaller modules are counted together


def profile_text(
    plan: PlanData,
    weights: Sequence[Held] = (),
    measured: Mapping[str, Measured] | None = None,
    *,
    depth: int = 3,
    limit: int = 10,
) -> str:
    """What fills memory at the peak of plain PyTorch's step, and beside it under the plan where there is a budget."""
    plain = Story(plan, plain=True, weights=weights).peak()
    planned = Story(plan, plain=False, weights=weights).peak() if plan.budget else None
    blocks = [
        _head(plan, plain, planned, measured or {}),
        _parts(plain, planned),
        _modules(plain, depth),
        _groups("op", plain, limit),
        _groups("line", plain, limit),
        _largest(plain.rows, limit),
    ]
    run = (measured or {}).get("plain")
    if run is not None and run.saved is not None:
        blocks.insert(3, _saved(saved_by_module(plan), run.saved, limit))
    return "\n\n".join("\n".join(lines) for lines in blocks)


def _head(plan: PlanData, plain: Snapshot, planned: Snapshot | None, measured: Mapping[str, Measured]) -> list[str]:
    torch = f", torch {plan.graph.versions['torch']}" if "torch" in plan.graph.versions else ""
    lines = [
        f"Profile of {plan.graph.model or 'a model'} on {plan.graph.device}{torch}, "
        f"batch {batch_text(plan.graph.batch)}",
        f"{'peak':<13}{format_bytes(plain.peak_bytes)} predicted{_found(plain, measured.get('plain'))}",
        f"{'at':<13}{plain.at or 'nowhere: the step is empty'}",
    ]
    if planned is not None:
        found = _found(planned, measured.get("planned"))
        lines.append(f"{'planned':<13}{format_bytes(planned.peak_bytes)} predicted{found}, budget {plan.budget}")
        lines.append(f"{'at':<13}{planned.at}")
    return [_cut(line, WIDTH) for line in lines]


def _found(snapshot: Snapshot, run: Measured | None) -> str:
    if run is None:
        return ""
    off = 100 * (snapshot.peak_bytes / run.peak_bytes - 1) if run.peak_bytes else 0.0
    return f", {format_bytes(run.peak_bytes)} measured ({off:+.2f} %)"


def _parts(plain: Snapshot, planned: Snapshot | None) -> list[str]:
    """Bars of the same scale, so that both columns compare by eye."""
    most = max(plain.peak_bytes, 1)
    head = f"{'at the peak':<46}{'plain':>11}" + (f"{'planned':>12}" if planned is not None else "")
    lines = [head]
    other = planned.parts if planned is not None else {}
    for part, text in PARTS.items():
        ours, theirs = plain.parts.get(part, 0), other.get(part, 0)
        if not ours and not theirs:
            continue
        line = f"{text:<46}{format_bytes(ours):>11}"
        line += f"{format_bytes(theirs):>12}" if planned is not None else ""
        lines.append(f"{line}  {_bar(ours, most)}".rstrip())
    total = f"{'all':<46}{format_bytes(plain.peak_bytes):>11}"
    lines.append(total + (f"{format_bytes(planned.peak_bytes):>12}" if planned is not None else ""))
    return lines


def _bar(nbytes: int, most: int) -> str:
    return "█" * round(_BAR * nbytes / most)


_SHOWN = ("parameters", "gradients", "saved")


def _modules(snapshot: Snapshot, depth: int) -> list[str]:
    head = "".join(f"{name:>12}" for name in ("all", *_SHOWN, "others"))
    lines = [f"{head}  modules at the peak"]
    _branch(module_tree(snapshot.rows), 0, depth, snapshot.peak_bytes, lines, 1)
    return lines


def _branch(node: Node, level: int, depth: int, most: int, lines: list[str], above: int) -> None:
    shown = [node.parts.get(part, 0) for part in _SHOWN]
    counts = (node.nbytes, *shown, node.nbytes - sum(shown))
    times = f" ×{node.times}" if node.times > above else ""
    times += f": {node.members}" if node.members else ""
    cells = "".join(f"{format_bytes(n) if n else '':>12}" for n in counts)
    lines.append(_cut(f"{cells}  {'  ' * level}{node.name or '(the model)'}{times}", WIDTH))
    if level >= depth:
        return
    ranked = sorted(node.children, key=lambda child: -child.nbytes)
    large = [child for child in ranked if child.nbytes >= _SMALL * most]
    for child in large:
        _branch(child, level + 1, depth, most, lines, node.times)
    rest = ranked[len(large) :]
    if rest and large:
        lines.append(f"{format_bytes(sum(c.nbytes for c in rest)):>12}{'':48}  {'  ' * (level + 1)}{len(rest)} smaller")


def _groups(what: str, snapshot: Snapshot, limit: int) -> list[str]:
    found = snapshot.by("source" if what == "line" else what)
    title = {"op": "ops that made it", "line": "lines that made it"}[what]
    items = [(name, nbytes) for name, nbytes in found.items() if name]
    lines = [f"{'at the peak':>12}  {title}"]
    lines += [_cut(f"{format_bytes(nbytes):>12}  {name}", WIDTH) for name, nbytes in items[:limit]]
    rest = items[limit:]
    return lines + ([f"{format_bytes(sum(n for _, n in rest)):>12}  {len(rest)} more"] if rest else [])


def _saved(predicted: Mapping[str, int], measured: Mapping[str, int], limit: int) -> list[str]:
    names = list(dict.fromkeys((*predicted, *measured)))  # no set: equal bytes stay in the model's order
    names.sort(key=lambda name: -max(predicted.get(name, 0), measured.get(name, 0)))
    lines = [f"{'predicted':>12}{'measured':>12}  saved for the backward, by the module that makes it"]
    total = sum(predicted.values()), sum(measured.values())
    lines.append(f"{format_bytes(total[0]):>12}{format_bytes(total[1]):>12}  (all)")
    shown = [(name or "(the model)", [name]) for name in names[:limit]]
    rest = [(f"{len(names) - limit} more", names[limit:])] if len(names) > limit else []
    for text, some in shown + rest:
        pair = (sum(counts.get(name, 0) for name in some) for counts in (predicted, measured))
        lines.append(_cut(f"{''.join(f'{format_bytes(n):>12}' for n in pair)}  {text}", WIDTH))
    return lines


def _largest(rows: Iterable[Held], limit: int) -> list[str]:
    """Equal tensors of repeated layers as one line."""
    groups: dict[tuple[object, ...], list[Held]] = {}
    for row in rows:
        path = re.sub(r"\d+", "#", row.module or row.name)
        key = (row.part, row.op, row.shape, row.nbytes, path, row.source)
        groups.setdefault(key, []).append(row)
    ranked = sorted(groups.values(), key=lambda group: -sum(row.nbytes for row in group))
    lines = [f"{'each':>12} {'':>5} {'part':<11} {'op':<22} tensor, and what holds it"]
    lines += [_cut(_tensor(group), WIDTH) for group in ranked[:limit]]
    return lines + ([f"... and {len(ranked) - limit} kinds more"] if len(ranked) > limit else [])


def _tensor(group: list[Held]) -> str:
    row, times = group[0], f"×{len(group)}" if len(group) > 1 else ""
    where = common_path([r.module or r.name for r in group]) if group[0].module else row.name
    until = f", until {re.sub(' of .*', '', row.until)}" if row.until else ""
    shape = f" {list(row.shape)}" if row.shape else ""
    return f"{format_bytes(row.nbytes):>12} {times:>5} {row.part:<11} {row.op:<22} {where}{shape}{until}"


def _cut(line: str, width: int) -> str:
    line = one_line(line)
    return line if len(line) <= width else line[: width - 1] + "…"
