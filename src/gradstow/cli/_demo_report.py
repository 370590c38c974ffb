"""What the demo found: as data, as text, and whether it is what was promised."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from gradstow._units import format_bytes
from gradstow.cli._demo_run import Run


@dataclass(frozen=True)
class Setting:
    """What is trained."""

    model: str
    image: int
    batch: int
    steps: int
    budget: str

    def arguments(self, data: Path) -> list[str]:
        """For the child."""
        numbers = {"image": self.image, "batch": self.batch, "steps": self.steps, "model": self.model}
        given = [text for name, value in numbers.items() for text in (f"--{name}", str(value))]
        return ["--data", str(data), "--budget", self.budget, *given]

    def __str__(self) -> str:
        return (
            f"{self.model} on 5,000 real MNIST digits, enlarged to 3×{self.image}×{self.image}, "
            f"batch {self.batch}, {self.steps} steps of AdamW"
        )


@dataclass(frozen=True)
class Demo:
    """The three runs and the plan. ``limited`` is None where the system cannot limit a process."""

    setting: Setting
    planning: Run
    plain: Run
    limited: Run | None
    stowed: Run
    picture: Path

    @property
    def equal(self) -> bool:
        """Whether every loss and every bit of the trained model is the same."""
        states = self.plain.get("trained", "state"), self.stowed.get("trained", "state")
        return bool(self.plain.bits) and self.plain.bits == self.stowed.bits and states[0] == states[1]

    @property
    def time_ratio(self) -> float:
        """Median step of the stowed run by that of the plain run; the first step warms up and is left out.

        The runs are one after the other, so whatever else the machine does counts; ``gradstow verify``
        compares in turns.
        """
        return _typical(self.stowed) / _typical(self.plain)

    def problems(self) -> list[str]:
        """What is not as promised."""
        found = []
        if self.limited is not None and self.limited.finished:
            found.append("plain PyTorch did not run out of memory under the limit")
        elif self.limited is not None and not self.limited.out_of_memory:
            found.append(f"plain PyTorch failed under the limit otherwise: {self.limited.last_words}")
        if not self.equal:
            found.append("the two runs did not train to the same bits")
        peak, allowed = self.stowed.get("measured", "step_peak_bytes"), self._plan("budget_step_bytes")
        if peak > allowed:
            found.append(f"the measured step peak {format_bytes(peak)} is over the budget of {format_bytes(allowed)}")
        return found

    def _plan(self, name: str) -> Any:
        return self.planning.get("planned", name)

    def to_json(self) -> dict[str, Any]:
        limited = {} if self.limited is None else {"plain under the limit": _run_json(self.limited)}
        return {
            "setting": vars(self.setting),
            "plan": {k: v for k, v in self.planning.told["planned"].items() if k != "kind"},
            "runs": {"plain": _run_json(self.plain), **limited, "gradstow": _run_json(self.stowed)},
            "equal": self.equal,
            "time_ratio": self.time_ratio,
            "problems": self.problems(),
            "picture": str(self.picture),
        }

    def __str__(self) -> str:
        lines = [f"{self.setting}.", *self._explanation(), "", *self._table(), "", *self._losses(), ""]
        lines.append(f"equal bit for bit: {'yes' if self.equal else 'NO'} (losses, parameters, buffers)")
        lines.append(f"memory over the step: {self.picture}")
        return "\n".join(lines)

    def _explanation(self) -> list[str]:
        lines = [
            "The same script each time; the last run has one line more:",
            f'    gs.stow(model, plan=gs.Plan.load("plan.json"))  # made for budget="{self.setting.budget}"',
        ]
        if self.limited is None:
            lines.append("This system cannot limit a process's memory, so no run has a limit.")
        else:
            lines.append(f"plain, limited: {self.limited.last_words or 'finished'}")
        return lines

    def _table(self) -> list[str]:
        runs = [run for run in (self.plain, self.limited, self.stowed) if run is not None]
        names = ["plain", "plain, limited", "gradstow"] if len(runs) == 3 else ["plain", "gradstow"]
        predicted = {
            id(self.plain): self._plan("plain_step_peak_bytes"),
            id(self.stowed): self._plan("predicted_step_peak_bytes"),
        }
        seconds = {id(self.plain): self._plan("plain_seconds"), id(self.stowed): self._plan("predicted_seconds")}
        rows = {
            "": names,
            "memory limit": [_bytes(run.limit_bytes, "none") for run in runs],
            "outcome": [_outcome(run) for run in runs],
            "step peak, measured": [_bytes(run.get("measured", "step_peak_bytes")) for run in runs],
            "step peak, predicted": [_bytes(predicted.get(id(run))) for run in runs],
            "process, training": [_bytes(run.training_bytes or run.highest_bytes or None) for run in runs],
            "seconds, measured": [self._pace(run) for run in runs],
            "seconds, predicted": [_seconds(seconds.get(id(run))) for run in runs],
        }
        return [f"{name:<24}{''.join(f'{cell:<22}' for cell in cells)}".rstrip() for name, cells in rows.items()]

    def _pace(self, run: Run) -> str:
        if not run.finished:
            return "-"
        ratio = f" (×{self.time_ratio:.2f})" if run is self.stowed else ""
        return f"{_typical(run):.2f}{ratio}"

    def _losses(self) -> list[str]:
        pairs = list(zip(self.plain.losses, self.stowed.losses, strict=False))
        same = [a == b for a, b in zip(self.plain.bits, self.stowed.bits, strict=False)]
        lines = [f"{'step':<6}{'loss, plain':<24}loss, gradstow"]
        for step, ((plain, stowed), equal) in enumerate(zip(pairs, same, strict=True), start=1):
            lines.append(f"{step:<6}{plain!r:<24}{stowed!r:<24}{'equal' if equal else 'DIFFERENT'}")
        return lines


def _typical(run: Run) -> float:
    return median(run.seconds[1:] or run.seconds)


def _outcome(run: Run) -> str:
    if run.finished:
        return "finished"
    return "out of memory" if run.out_of_memory else "failed"


def _bytes(count: int | None, missing: str = "-") -> str:
    """In one unit, so that a row can be compared at a glance."""
    return missing if count is None else f"{count / 2**20:,.0f} MiB"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"


def _run_json(run: Run) -> dict[str, Any]:
    return {
        "limit_bytes": run.limit_bytes,
        "outcome": _outcome(run),
        "last_words": "" if run.finished else run.last_words,
        "losses": run.losses,
        "loss_bits": run.bits,
        "seconds": run.seconds,
        "step_peak_bytes": run.get("measured", "step_peak_bytes"),
        "ready_bytes": run.get("ready", "data_bytes"),
        "training_bytes": run.training_bytes or None,
        "highest_bytes": run.highest_bytes or None,
        "state_sha256": run.get("trained", "state"),
    }
