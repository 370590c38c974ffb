"""Whether the numbers are plain PyTorch's: equal bit for bit, or how far they are from float64."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import Any

import torch

from gradstow._verify import Trainee, digest, seed
from gradstow.capture import same_randomness

STEPS = 2  # the first one may be rehearsed, recorded or compiled
OTHER = 0.1  # farther from float64 is plain float32 only where other random numbers were drawn


@dataclass(frozen=True)
class Numbers:
    """Gradients of a step; digests of its loss and gradients, and of the buffers after it."""

    gradients: list[torch.Tensor | None]
    digests: tuple[str, ...]
    buffers: tuple[str, ...]
    first_seconds: float  # with what is compiled or planned there

    def error(self, reference: Numbers) -> float:
        """Norm of what all gradients are off by, as a part of the reference's."""
        apart = whole = 0.0
        for ours, theirs in zip(self.gradients, reference.gradients, strict=True):
            if ours is None or theirs is None:
                if ours is not theirs:
                    return float("inf")
                continue
            apart += float((ours.double() - theirs.double()).square().sum())
            whole += float(theirs.double().square().sum())
        return (apart / whole) ** 0.5 if whole else float(apart > 0)


def numbers(trainee: Trainee, first: int = 0) -> Numbers:
    """Of the last of a few steps, without an optimizer's: each starts the random streams anew."""
    seconds = []
    with same_randomness():
        for number in range(first, STEPS):
            seed(number)
            begun = time.perf_counter()
            loss = trainee.step()
            seconds.append(time.perf_counter() - begun)
    gradients = [p.grad for p in trainee.model.parameters()]
    found = Numbers(
        [None if g is None else g.detach().cpu() for g in gradients],
        tuple(digest(t) for t in (loss, *gradients)),
        tuple(digest(b) for b in trainee.model.buffers()),
        seconds[0],
    )
    trainee.optimizer.zero_grad(set_to_none=True)
    return found


def reference(plain: Trainee) -> Numbers:
    """The same step in float64."""
    model = copy.deepcopy(plain.model).double()
    batch = torch.utils._pytree.tree_map(lambda t: t.double() if t.is_floating_point() else t, plain.batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return numbers(Trainee(model, optimizer, plain.call, plain.loss, batch), first=STEPS - 1)


def draws(plain: Trainee, device: str) -> bool:
    """Whether a step draws random numbers."""
    with same_randomness():
        before = _state(device)
        plain.step()
        plain.optimizer.zero_grad(set_to_none=True)
        return not torch.equal(before, _state(device))


def _state(device: str) -> torch.Tensor:
    return torch.cuda.get_rng_state() if device.startswith("cuda") else torch.get_rng_state()


def compared(ours: Numbers, plain: Numbers) -> dict[str, str]:
    """Columns of an eager way: bit for bit, loss and gradients, and what the forward writes (running statistics)."""
    return {
        "equal": "yes" if ours.digests == plain.digests else "no",
        "buffers_equal": "yes" if ours.buffers == plain.buffers else "no",
    }


def errors(ours: Numbers, plain: Numbers, exact: Numbers, random: bool) -> dict[str, Any]:
    """Columns of a compiled way. The error relative to torch.compile's is found where all rows are."""
    eager = plain.error(exact)
    if random and eager > OTHER:
        return {"eager_error": eager, "note": "float64 draws other random numbers, so errors say nothing"}
    return {"error": ours.error(exact), "eager_error": eager}
