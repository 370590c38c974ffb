"""``gs.layers.convert`` on every torchvision classification model: one training step before and after.

    python benchmarks/convert.py                          # all, about half an hour on two cores
    python benchmarks/convert.py --models resnet50 vgg11

Outputs and gradients are compared bit for bit; where they differ, both are held against float64 and the ratio of the
errors is shown. Bytes kept for the backward and step peaks are measured. Exits with 1 where a ratio is over 2, or a
peak is higher than before.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent)

import gradstow as gs
from _rows import VERSIONS, parse, versions, write
from gradstow import layers
from gradstow.capture import same_randomness
from zoo import _torchvision
from zoo._subject import Subject

MIB = 1 << 20
FIELDS = [
    "model", "converted", "left", "equal", "error_ratio", "kept_mib", "plain_kept_mib", "peak_mib", "plain_peak_mib",
    *VERSIONS,
]  # fmt: skip


@dataclass
class Trained:
    """What one training step gave: the loss, then all gradients and buffers; and its peak in bytes."""

    numbers: list[torch.Tensor]
    peak_bytes: int


def trained(model: torch.nn.Module, subject: Subject, dtype: torch.dtype = torch.float32) -> Trained:
    """Of a copy, on the same random numbers each time."""
    model = copy.deepcopy(model).to(dtype)
    batch = tuple(x.to(dtype) if x.is_floating_point() else x for x in subject.batch)
    with same_randomness():
        torch.manual_seed(0)
        with gs.measure_peak("cpu") as memory:
            loss = subject.loss(model(batch[0]), batch)
            loss.backward()
    numbers = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]
    return Trained(numbers, memory.peak_bytes)


def error(found: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    """The largest of any tensor, relative to the tensor's norm."""
    pairs = zip(found, right, strict=True)
    return max(float((a.double() - b).norm() / b.norm().clamp_min(1e-30)) for a, b in pairs if a.is_floating_point())


def compared(name: str) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        subject = _torchvision.build(name)
    lean = copy.deepcopy(subject.model)
    conversion = layers.convert(lean, batch=subject.batch)
    plain, changed = trained(subject.model, subject), trained(lean, subject)
    equal = all(torch.equal(a, b) for a, b in zip(plain.numbers, changed.numbers, strict=True))
    ratio = 1.0
    if not equal:
        right = trained(subject.model, subject, torch.float64).numbers
        ratio = error(changed.numbers, right) / error(plain.numbers, right)
    return {
        "model": name,
        "converted": len(conversion.swaps),
        "left": len(conversion.left),
        "equal": equal,
        "error_ratio": ratio,
        "kept_mib": (conversion.saved_after or 0) / MIB,
        "plain_kept_mib": (conversion.saved_before or 0) / MIB,
        "peak_mib": changed.peak_bytes / MIB,
        "plain_peak_mib": plain.peak_bytes / MIB,
    }


def main() -> int:
    from torchvision import models

    arguments = parse(__doc__, models.list_models(module=models), "convert.csv").parse_args()
    bad = []
    for name in arguments.models:
        row = compared(name)
        write(arguments.out, FIELDS, {**row, **versions()})
        if row["error_ratio"] > 2 or row["peak_mib"] > row["plain_peak_mib"]:
            bad.append(name)
    if bad:
        print(f"worse than before: {', '.join(bad)}", file=sys.stderr)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
