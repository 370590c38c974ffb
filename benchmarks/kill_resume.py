"""Kill a training run with SIGKILL at random moments, resume it each time, and compare with a run left alone.

Each run trains a small network with dropout and momentum under a budget, checkpoints after every step, and is killed
several times, anywhere: while it plans, computes or writes. Every loss that it ever gives, its final weights and its
random streams must be those of the run left alone, bit for bit.

    python benchmarks/kill_resume.py --kills 50 --seed 0
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS = 60
SOURCES = Path(__file__).parents[1] / "src"


def child(folder: Path) -> None:
    """Train from the last checkpoint on; append each step's loss, then write the digests of the final weights."""
    import numpy as np
    import torch
    from torch import nn

    from gradstow._verify import digest
    from gradstow.train import AdaptiveClip, TrainStep

    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.2))]
    model = nn.Sequential(nn.Linear(16, 32), *layers, nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    step = TrainStep(
        model,
        optimizer,
        loss=lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
        budget="80%",
        micro_batch=64,
        clip=AdaptiveClip(warmup=3, window=10),
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    )
    checkpoint = folder / "run.pt"
    if checkpoint.exists():
        step.load(checkpoint)
    with (folder / "losses.jsonl").open("a", encoding="utf-8") as log:
        while (number := step.data) < STEPS:
            batch = torch.randn(128, 16), torch.randint(0, 4, (128,))
            shift = random.random() + np.random.rand()  # the data's augmentation draws from these streams
            result = step((batch[0] + shift, batch[1]))
            log.write(json.dumps([number, result.loss.hex(), result.grad_norm.hex()]) + "\n")
            log.flush()
            step.data = number + 1
            step.save(checkpoint)
    state = {**model.state_dict(), "random": torch.get_rng_state()}
    final = {name: digest(tensor) for name, tensor in state.items()}
    (folder / "final.json").write_text(json.dumps(final), encoding="utf-8")


def run(folder: Path, cache: Path, kill_at: tuple[int, float] | None = None) -> bool:
    """Whether a child came to its end. It is killed so many seconds after it has logged so many steps."""
    path = os.pathsep.join([str(SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GRADSTOW_CACHE_DIR": str(cache)}
    command = [sys.executable, __file__, "--child", str(folder)]
    with (folder / "errors.txt").open("w+", encoding="utf-8") as errors:
        process = subprocess.Popen(command, env=environment, stderr=errors)
        try:
            if kill_at is not None and _killed(process, folder, *kill_at):
                return False
        finally:
            code = process.wait()
        if code != 0:
            errors.seek(0)
            raise RuntimeError(f"the run failed: {errors.read()}")
    return True


def _killed(process: subprocess.Popen[bytes], folder: Path, lines: int, seconds: float) -> bool:
    log = folder / "losses.jsonl"
    while lines and not (log.exists() and log.read_bytes().count(b"\n") >= lines):
        if process.poll() is not None:
            return False
        time.sleep(0.001)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    return process.wait() != 0


def losses(folder: Path) -> dict[int, set[str]]:
    """What every step gave, each time that it ran; a last line that was cut off is left out."""
    found: dict[int, set[str]] = {}
    for line in (folder / "losses.jsonl").read_text(encoding="utf-8").splitlines():
        try:
            number, *values = json.loads(line)
        except ValueError:
            continue
        found.setdefault(number, set()).add(" ".join(values))
    return found


def compare(expected: Path, got: Path) -> list[str]:
    """What differs, by name."""
    pairs: list[tuple[Any, Any, str]] = [(losses(expected), losses(got), "a loss")]
    final = [json.loads((f / "final.json").read_text(encoding="utf-8")) for f in (expected, got)]
    pairs += [(final[0][name], final[1].get(name), name) for name in final[0]]
    return [name for a, b, name in pairs if a != b]


def trials(kills: int, per_run: int, seed: int, folder: Path) -> list[dict[str, Any]]:
    """One row per run: after which steps and seconds it was killed, and what differs from the run left alone."""
    alone, cache, chance = folder / "alone", folder / "cache", random.Random(seed)
    alone.mkdir()
    run(alone, cache)
    rows: list[dict[str, Any]] = []
    while kills > 0:
        place, moments = folder / f"run-{len(rows)}", []
        place.mkdir()
        done = 0
        for number in range(min(kills, per_run)):
            # The first one of every second run comes while it starts and plans, the others anywhere in a step.
            early = number == 0 and len(rows) % 2 == 1
            lines = 0 if early else chance.randint(done + 1, STEPS - 1)
            moment = lines, chance.uniform(0, 8) if early else chance.uniform(0, 0.03)
            if run(place, cache, moment):
                break
            moments.append(moment)
            done = min(STEPS - 2, (place / "losses.jsonl").read_bytes().count(b"\n") if lines else 0)
        run(place, cache)
        rows.append({"killed_at": moments, "differs": compare(alone, place)})
        kills -= max(1, len(moments))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--per-run", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.child)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        rows = trials(options.kills, options.per_run, options.seed, Path(folder))
    for row in rows:
        print(json.dumps(row))
    wrong = [row for row in rows if row["differs"]]
    print(f"{sum(len(row['killed_at']) for row in rows)} kills in {len(rows)} runs, {len(wrong)} runs differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
