"""The report as text for a terminal of 120 columns."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gradstow._codes import CODES
from gradstow._units import format_bytes, format_seconds
from gradstow.ir import PlanData
from gradstow.report._rows import Row, plan_rows
from gradstow.report._summary import Summary, summarize

WIDTH = 120
_SHOWN = 8  # graph breaks
# bytes, ×n, decision, op, shape, module: the reason gets what is left
_COLUMNS = (10, 4, 9, 16, 20, 19)
_DTYPES = {
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "bfloat16": "bf16",
    "uint8": "u8",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
}


def plan_text(plan: PlanData, *, limit: int | None = 20, free: bool = False) -> str:
    """What the plan is for, what it predicts, and its largest values.

    Args:
        limit: how many lines of the table; None shows all.
        free: show values that the backward does not need, too.
    """
    rows = plan_rows(plan)
    shown = [row for row in rows if free or row.decision != "free"]
    return "\n".join([*_header(summarize(plan, rows)), "", *_table(shown, limit)])


def _header(s: Summary) -> list[str]:
    torch = f", torch {s.versions['torch']}" if "torch" in s.versions else ""
    parts = ", ".join(f"{name} {format_bytes(n)}" for name, n in s.resident.items() if n)
    lines = [
        ("batch", s.batch),
        ("budget", s.budget or "none"),
        ("resident", f"{format_bytes(s.resident_bytes)}{f' ({parts})' if parts else ''}"),
        ("step peak", _against(s.predicted_step_peak_bytes, s.plain_step_peak_bytes)),
        ("total peak", _against(s.predicted_peak_bytes, s.plain_peak_bytes)),
        ("peak at", str(s.peak_at or "nowhere: the step is empty")),
        ("step time", _time(s)),
        ("reruns", f"{s.rerun_ops} ops"),
        ("values", _decisions(s)),
        *(("graph breaks", text) for text in _breaks(s)),
    ]
    lines += [("not exact", f"{n} values kept as {code}: {CODES[code]}") for code, n in s.lossy.items()]
    lines += [("rule", str(note)) for note in s.solver.get("rules", ())]
    if s.not_planned:
        names = "; ".join(f"{name} ({n} ops)" for name, n in s.not_planned.items())
        room = f", with room of {format_bytes(s.outside_bytes)}" if s.outside_bytes else ""
        lines.append(("not planned", f"{names}: runs as plain PyTorch{room}"))
    title = f"Plan for {s.model or 'a model'} on {s.device}{torch}, policy {s.policy}"
    return [cut(title, WIDTH), *(f"{name:<13}{cut(text, WIDTH - 13)}" for name, text in lines)]


def _against(predicted: int, plain: int) -> str:
    share = f" ({100 * predicted / plain:.0f} %)" if plain else ""
    return f"{format_bytes(predicted)} predicted, {format_bytes(plain)} plain{share}"


def _time(s: Summary) -> str:
    text = f"{format_seconds(s.predicted_seconds)} predicted, {format_seconds(s.plain_seconds)} plain"
    if s.plain_seconds:
        text += f" ({100 * (s.predicted_seconds / s.plain_seconds - 1):+.1f} %)"
    if s.decisions["offload"].values:
        text += f"; waits {format_seconds(s.wait_seconds)} for what travels"
    if s.lower_bound_seconds:
        text += f"; proven bound {format_seconds(s.lower_bound_seconds)}, gap {100 * s.gap:.2f} %"
    return text


def _breaks(s: Summary) -> list[str]:
    """Those that keep most come first."""
    texts = [str(b) for b in sorted(s.breaks, key=lambda b: -b.nbytes)]
    rest = [f"... and {len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
    return texts[:_SHOWN] + rest or ["none"]


def _decisions(s: Summary) -> str:
    shares = [(name, share) for name, share in s.decisions.items() if share.values and name != "free"]
    return ", ".join(f"{name} {share.values} ({format_bytes(share.nbytes)})" for name, share in shares) or "none"


@dataclass(frozen=True, slots=True)
class _Line:
    """Rows that differ only in numbers of their module paths: repeated layers."""

    rows: tuple[Row, ...]

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows)

    def cells(self) -> tuple[str, ...]:
        row = self.rows[0]
        shape = f"{_DTYPES.get(row.dtype, row.dtype)}[{','.join(map(str, row.shape))}]"
        times = f"×{len(self.rows)}" if len(self.rows) > 1 else ""
        where = common_path([r.module for r in self.rows]) or row.source
        return format_bytes(row.nbytes), times, row.decision, row.op, shape, where


def collapse(rows: Iterable[Row]) -> list[_Line]:
    """Equal values of repeated layers as one line, the lines with the most bytes first."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        path = re.sub(r"\d+", "#", row.module)
        key = (row.decision, row.op, row.shape, row.dtype, row.nbytes, path, "" if path else row.source)
        groups.setdefault(key, []).append(row)
    return sorted((_Line(tuple(group)) for group in groups.values()), key=lambda line: -line.nbytes)


def common_path(paths: list[str]) -> str:
    """``["h.0.mlp", "h.1.mlp"]`` → ``"h.*.mlp"``."""
    parts = [re.split(r"(\d+)", path) for path in paths]
    return "".join(p[0] if len(set(p)) == 1 else "*" for p in zip(*parts, strict=True))


def _table(rows: list[Row], limit: int | None) -> list[str]:
    lines = collapse(rows)
    shown = lines if limit is None else lines[:limit]
    head = _render(("each", "", "decision", "op", "shape", "module"), "reason")
    result = [head, *(_render(line.cells(), _reason(line)) for line in shown)]
    rest = lines[len(shown) :]
    if rest:
        count = sum(len(line.rows) for line in rest)
        result.append(f"... and {count} smaller values, {format_bytes(sum(line.nbytes for line in rest))}")
    return result


def _reason(line: _Line) -> str:
    """The first row's reason: the same op on the same shape costs the same in every layer."""
    return line.rows[0].reason


def _render(cells: tuple[str, ...], reason: str) -> str:
    fitted = [cut(cell, width).ljust(width) for cell, width in zip(cells, _COLUMNS, strict=True)]
    fitted[0] = fitted[0].strip().rjust(_COLUMNS[0])
    if len(cells[-1]) > _COLUMNS[-1]:  # the end of a module's path says more than its beginning
        fitted[-1] = "…" + one_line(cells[-1][1 - _COLUMNS[-1] :])
    left = " ".join(fitted)
    return f"{left} {cut(reason, WIDTH - len(left) - 1)}".rstrip()


def one_line(text: str) -> str:
    """Without what a terminal obeys: a module's name may hold line ends and escape codes."""
    return "".join(sign if sign.isprintable() else "\ufffd" for sign in text)


def cut(text: str, width: int) -> str:
    text = one_line(" ".join(text.split()))
    return text if len(text) <= width else text[: width - 1] + "…"
