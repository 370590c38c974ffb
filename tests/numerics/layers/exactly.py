"""Whether a lean function is its original to the last bit: output, gradient, layouts and random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Run = Callable[[torch.Tensor], torch.Tensor]


def outcome(run: Run, x: torch.Tensor, along: torch.Tensor | None = None, seed: int = 0) -> dict[str, Any]:
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    torch.manual_seed(seed)
    y = run(x)
    random = torch.get_rng_state()
    if along is None:
        generator = torch.Generator().manual_seed(seed)
        along = torch.empty_like(y, dtype=torch.float32).normal_(generator=generator).to(y)
    y.backward(along)
    assert x.grad is not None
    return {"output": y.detach(), "gradient": x.grad, "random": random}


def differences(lean: Run, original: Run, x: torch.Tensor, along: torch.Tensor | None = None) -> list[str]:
    """What is not equal. NaN equals NaN."""
    one, two = outcome(lean, x, along), outcome(original, x, along)
    found = [name for name in one if not _equal(one[name], two[name])]
    return found + [f"layout of {name}" for name in one if one[name].stride() != two[name].stride()]


def _equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    return torch.equal(one.isnan(), two.isnan()) and torch.equal(one.nan_to_num(), two.nan_to_num())


def compiled_differences(run: Run, x: torch.Tensor, *, dynamic: bool = False) -> list[str]:
    """What a whole graph of ``run`` does otherwise than ``run`` itself."""
    torch._dynamo.reset()
    return differences(torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=dynamic), run, x)
