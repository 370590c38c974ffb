"""How lean layers are judged: against their originals, and those against float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch


def gradients(
    run: Callable[..., torch.Tensor], inputs: Sequence[Any], seed: int = 0
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The output, and a gradient (or None) per tensor input, for one random output gradient."""
    taken = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in inputs]
    output = run(*taken)
    generator = torch.Generator().manual_seed(seed)
    along = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
    output.backward(along)
    return output.detach(), [x.grad if isinstance(x, torch.Tensor) else None for x in taken]


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative to the norm of what is right; in float64."""
    exact = exact.double()
    return float((found.double() - exact).norm() / exact.norm().clamp_min(1e-300))


def assert_no_worse(
    lean: Callable[..., torch.Tensor],
    original: Callable[..., torch.Tensor],
    inputs: Sequence[Any],
    ratio: float = 2.0,
) -> None:
    """Output and gradients of ``lean`` are equal to the original's, or their error against float64 is at most
    ``ratio`` times the original's own."""
    exact = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]
    found, plain, right = gradients(lean, inputs), gradients(original, inputs), gradients(original, exact)
    assert found[0].dtype == plain[0].dtype
    assert found[0].shape == plain[0].shape
    for one, two, three in zip([found[0], *found[1]], [plain[0], *plain[1]], [right[0], *right[1]], strict=True):
        assert (one is None) == (two is None)
        if one is None or two is None or three is None:
            continue
        assert one.dtype == two.dtype
        if torch.equal(one, two) or not one.numel():
            continue
        assert error(one, three) <= ratio * error(two, three), (error(one, three), error(two, three))


def assert_same_state(lean: torch.nn.Module, original: torch.nn.Module) -> None:
    """The two load each other's ``state_dict``, strictly."""
    lean.load_state_dict(copy.deepcopy(original.state_dict()))
    original.load_state_dict(lean.state_dict())
    assert [(n, p.shape) for n, p in lean.named_parameters()] == [(n, p.shape) for n, p in original.named_parameters()]
