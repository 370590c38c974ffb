"""The training script of ``gradstow demo``: ``python -m gradstow.cli._demo_child``, a process of its own.

Every run is this same script. With ``--plan`` it has one line more: ``gs.stow(model, plan=...)``. With
``--limit`` the system refuses the process more private memory than that, from its first line on. It
talks to the demo by JSON lines on stdout.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

TOLD = "gradstow demo: "
SEED = 0
SMALL = "a small convolutional network"
REFUSED = 3  # exit code where gradstow refuses on purpose


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.limit:
        import resource  # not on Windows, where the demo sets no limit

        resource.setrlimit(resource.RLIMIT_DATA, (options.limit, options.limit))
    from gradstow._errors import GradstowError

    try:
        _make_plan(options) if options.make_plan else _train(options)
    except GradstowError as error:
        tell("refused", error=type(error).__name__, message=str(error))
        print(f"gradstow: {error}", file=sys.stderr)
        return REFUSED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="resnet50")
    for name in ("--image", "--batch", "--steps"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--make-plan", type=Path)
    parser.add_argument("--budget", default="60%")
    return parser


def tell(kind: str, **data: Any) -> None:
    print(f"{TOLD}{json.dumps({'kind': kind, **data})}", flush=True)


def data_bytes(process: str | int = "self") -> int | None:
    """The private memory that a limit on the process counts; None where the system does not tell."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:")]
    return found[0] if found else None


def _build(options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    import torch

    torch.manual_seed(SEED)
    if options.model == SMALL:
        model = _small_network()
    else:
        import torchvision

        model = torchvision.models.get_model(options.model, weights=None, num_classes=10)
    return model.train(), torch.optim.AdamW(model.parameters(), lr=3e-4)


def _small_network() -> torch.nn.Module:
    """Much memory for little work: equal layers on large planes, so that few ops have to be timed."""
    from torch import nn

    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(6):
        layers += [nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, 10)]
    return nn.Sequential(*layers, *head)


class Digits:
    """Batches of MNIST digits, enlarged to three equal colour planes."""

    def __init__(self, path: Path, batch: int, image: int) -> None:
        import numpy as np

        with np.load(path) as file:
            self.pixels, self.labels = file["pixels"], file["labels"]
        self.order = np.random.default_rng(SEED).permutation(len(self.labels))
        self.batch, self.image = batch, image

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        start = step * self.batch % (len(self.order) - self.batch + 1)
        chosen = self.order[start : start + self.batch]
        grey = torch.from_numpy(self.pixels[chosen]).float().div(255).sub(0.1307).div(0.3081)
        size = (self.image, self.image)
        large = torch.nn.functional.interpolate(grey[:, None], size, mode="bilinear", align_corners=False)
        return large.repeat(1, 3, 1, 1), torch.from_numpy(self.labels[chosen])


def _loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    import torch

    return torch.nn.functional.cross_entropy(output, batch[1])


def _make_plan(options: Any) -> None:
    import gradstow as gs
    from gradstow._units import parse_budget

    model, optimizer = _build(options)
    batch = Digits(options.data, options.batch, options.image)[0]
    plan = gs.plan(
        model,
        batch,
        loss=_loss,
        optimizer=optimizer,
        budget=options.budget,
        keep_output=False,
        progress=lambda stage, done, total: tell("progress", stage=stage, done=done, total=total),
    )
    plan.save(options.make_plan)
    budget = parse_budget(options.budget)
    allowed = plan.plain_step_peak_bytes
    if budget.percent is not None:
        allowed = int(allowed * budget.percent / 100)
    elif budget.total_bytes is not None:
        allowed = budget.total_bytes - plan.resident_bytes
    tell(
        "planned",
        predicted_step_peak_bytes=plan.predicted_step_peak_bytes,
        plain_step_peak_bytes=plan.plain_step_peak_bytes,
        predicted_peak_bytes=plan.predicted_peak_bytes - plan.resident_bytes,
        predicted_seconds=plan.predicted_seconds,
        plain_seconds=plan.plain_seconds,
        optimizer_state_bytes=plan.graph.resident.optimizer,
        budget_step_bytes=allowed,
        rerun_ops=plan.rerun_ops,
    )


def _train(options: Any) -> None:
    import gradstow as gs

    model, optimizer = _build(options)
    digits = Digits(options.data, options.batch, options.image)
    batch = digits[0]
    tell("ready", data_bytes=data_bytes())
    if options.plan:
        gs.stow(model, plan=gs.Plan.load(options.plan))
    for step in range(options.steps):
        started = time.perf_counter()
        batch = digits[step]
        optimizer.zero_grad()
        loss = _loss(model(batch[0]), batch)
        loss.backward()
        optimizer.step()
        value = float(loss.detach())
        tell("step", loss=value, bits=value.hex(), seconds=time.perf_counter() - started)
    tell("trained", state=_checksum(model), data_bytes=data_bytes())
    del loss
    optimizer.zero_grad()
    with gs.measure_peak("cpu") as memory:
        loss = _loss(model(batch[0]), batch)
        loss.backward()
    tell("measured", step_peak_bytes=memory.peak_bytes, timeline=memory.timeline)


def _checksum(model: torch.nn.Module) -> str:
    """Of every bit of every parameter and buffer, by name."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
