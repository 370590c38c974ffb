"""TrainStep: its overhead over a hand-written loop, and what choosing micro-batch and plan together brings.

    python benchmarks/train_step.py                              # about an hour on two cores
    python benchmarks/train_step.py --part overhead --rounds 15
    python benchmarks/train_step.py --part choice --models gpt2 --batch 16
    python benchmarks/train_step.py --tiny                       # a minute, to see that it runs

``overhead`` trains ResNet-50 by hand and through ``gs.TrainStep`` in turn, without a budget. ``choice`` gives three
ways half of plain PyTorch's step peak for the batch: only smaller micro-batches (plain PyTorch, the largest that fits),
only recomputation (one planned batch), and ``micro_batch="auto"``. Peaks are all live bytes; the time of a way's first
windows, in which it plans, does not count. Rounds are interleaved; ratios are of medians, with 95 % intervals.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

import gradstow as gs
from _cases import CASES
from _rows import VERSIONS, parse, versions, write
from gradstow._units import parse_budget
from gradstow._verify import median_interval, seed
from gradstow._wanted import Wanted
from gradstow.cli._targets import Target, build_target
from gradstow.train._choose import choose
from gradstow.train._grown import Samples
from gradstow.train._precision import Precision
from gradstow.train._sized import SizedStep
from gradstow.train._step import TrainStep

MIB = 1 << 20
TINY = "transformers:gpt2,n_layer=2,n_embd=64,n_head=2,vocab_size=256"
FIELDS = [
    "part", "model", "batch", "setting", "micro_batch", "micro_batches", "budget_mib", "predicted_peak_mib",
    "measured_peak_mib", "samples_per_second", "predicted_samples_per_second", "ratio", "ratio_low", "ratio_high",
    "rerun_ops", "rounds", *VERSIONS,
]  # fmt: skip
_WARM = 2  # windows in which a way plans and gets warm

Step = Callable[[], Any]


def main() -> None:
    parser = parse(__doc__, ("vit_b_16", "gpt2"), "train_step.csv", rounds=7, batch=64)
    parser.add_argument("--part", choices=("all", "overhead", "choice"), default="all")
    parser.add_argument("--tiny", action="store_true", help="a tiny model in place of all, written nowhere but shown")
    arguments = parser.parse_args()
    if arguments.part in ("all", "overhead"):
        overhead(arguments)
    if arguments.part in ("all", "choice"):
        for name in ("tiny",) if arguments.tiny else arguments.models:
            compare_ways(name, arguments)


def target_of(name: str, batch: int) -> Target:
    if name == "tiny":
        return build_target(TINY, batch, seq=64)
    case = CASES[name]
    return build_target(case.target, batch, attn=case.attn, seq=case.seq)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.001, momentum=0.9)


def record(arguments: argparse.Namespace, row: Mapping[str, Any]) -> None:
    full = {**row, "rounds": arguments.rounds, **versions(arguments.device)}
    if arguments.tiny:
        print(" ".join(f"{k}={v}" for k, v in full.items() if k not in VERSIONS))
    else:
        write(arguments.out, FIELDS, full)


# ------------------------------------------------------------------------------------------------- overhead


def overhead(arguments: argparse.Namespace) -> None:
    name, batch = ("tiny", 4) if arguments.tiny else ("resnet50", 8)
    target = target_of(name, batch)
    hand = by_hand(target, arguments.device)
    twin = copy.deepcopy(target.model).to(arguments.device)
    step = TrainStep(twin, sgd(twin), loss=target.loss)
    data = moved(target.batch, arguments.device)
    times = interleaved({"hand": hand, "step": lambda: step(data)}, arguments)
    ratios = [a / b for a, b in zip(times["step"], times["hand"], strict=True)]
    low, high = median_interval(ratios)
    record(
        arguments,
        {
            "part": "overhead",
            "model": name,
            "batch": batch,
            "setting": "TrainStep / by hand",
            "samples_per_second": batch / statistics.median(times["step"]),
            "ratio": statistics.median(times["step"]) / statistics.median(times["hand"]),
            "ratio_low": low,
            "ratio_high": high,
        },
    )


def by_hand(target: Target, device: str) -> Step:
    """The loop that everyone writes, with the loss read at the end as a training log does."""
    model, batch, loss_of = copy.deepcopy(target.model).to(device), moved(target.batch, device), target.loss
    optimizer = sgd(model)

    def run() -> float:
        optimizer.zero_grad(set_to_none=True)
        if loss_of is None:
            loss = model(**batch).loss
        else:
            loss = loss_of(model(batch[0]), batch)
        loss.backward()
        optimizer.step()
        return float(loss)

    return run


# --------------------------------------------------------------------------------------------------- choice


def compare_ways(name: str, arguments: argparse.Namespace) -> None:
    size = min(arguments.batch, 16) if arguments.tiny else arguments.batch
    target = target_of(name, size)
    data = moved(target.batch, arguments.device)
    model = target.model.to(arguments.device)
    options = {"loss": target.loss, "optimizer": sgd(model)}
    choice = choose(model, data, budget="50%", **options)
    print(choice, flush=True)
    budget = choice.budget_bytes
    assert budget is not None
    asked: dict[str, dict[str, Any]] = {
        "smaller micro-batches": {"micro_batch": largest_plain(target, data, size, budget)},
        "recomputation": {"micro_batch": None, "budget": budget},
        "auto": {"micro_batch": "auto", "budget": budget},
    }
    ways = {way: way_of(target, arguments.device, given) for way, given in asked.items()}
    rows = {way: first_windows(step, data, size, budget) for way, step in list(ways.items())}
    for way in [way for way, row in rows.items() if "refused" in row]:
        print(f"{name}: {way} is refused: {rows.pop(way)['refused']}", flush=True)
        del ways[way]
    times = interleaved({way: (lambda s=step: s(data)) for way, step in ways.items()}, arguments)  # type: ignore[misc]
    for way, row in rows.items():
        ratios = [a / b for a, b in zip(times["auto"], times[way], strict=True)]
        low, high = median_interval(ratios)
        speed = size / statistics.median(times[way])
        found = {"samples_per_second": speed, "ratio": statistics.median(ratios), "ratio_low": low, "ratio_high": high}
        if way == "auto":
            found["predicted_samples_per_second"] = choice.chosen.samples_per_second
        record(arguments, {"part": "choice", "model": name, "batch": size, "setting": way, **row, **found})


def largest_plain(target: Target, data: Any, size: int, budget: int) -> int:
    """The largest micro-batch whose plain step fits, with the gradients that it is added to."""
    step = SizedStep(
        target.model, Samples(data), target.loss, sgd(target.model), None, Precision.of("fp32"), False, Wanted()
    )
    step.batch_bytes = step.bytes_of(size)
    for count in range(2, size + 1):
        micro = -(-size // count)
        if step.plan(micro, "quick", adds=True).plain_peak_bytes <= budget:
            return micro
    raise SystemExit(f"not even one sample fits half of plain PyTorch's peak for {size}")


def way_of(target: Target, device: str, given: dict[str, Any]) -> TrainStep:
    twin = copy.deepcopy(target.model).to(device)
    return TrainStep(twin, sgd(twin), loss=target.loss, **given)


def first_windows(step: TrainStep, data: Any, size: int, budget: int) -> dict[str, Any]:
    """Plans and warms up; then the measured peak of one window."""
    try:
        for number in range(_WARM):
            seed(number)
            predicted = step(data).peak_bytes
    except gs.errors.BudgetTooSmall as error:
        return {"refused": str(error)}
    step.measure = True
    result = step(data)
    step.measure = False
    micro = step.micro_batch or size
    return {
        "micro_batch": micro,
        "micro_batches": result.micro_batches,
        "budget_mib": parse_budget(budget).total_bytes / MIB,  # type: ignore[operator]
        "predicted_peak_mib": None if predicted is None else predicted / MIB,
        "measured_peak_mib": None if result.peak_bytes is None else result.peak_bytes / MIB,
    }


# --------------------------------------------------------------------------------------------------- timing


def interleaved(steps: Mapping[str, Step], arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each way in every round, in an order that turns from round to round."""
    for step in steps.values():
        for _ in range(_WARM):
            step()
    found: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(arguments.rounds):
        names = list(steps)[:: 1 if number % 2 == 0 else -1]
        for name in names:
            wait(arguments.device)
            started = time.perf_counter()
            steps[name]()
            wait(arguments.device)
            found[name].append(time.perf_counter() - started)
    return found


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def moved(batch: Any, device: str) -> Any:
    return torch.utils._pytree.tree_map(lambda t: t.to(device) if isinstance(t, torch.Tensor) else t, batch)


if __name__ == "__main__":
    main()
