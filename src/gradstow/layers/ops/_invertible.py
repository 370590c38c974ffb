"""Norms that keep their output: when the normalised input can be made again from it, and how."""

from __future__ import annotations

import torch

from gradstow._errors import GradstowError, PolicyError
from gradstow.layers.ops import _bits

_SAVES = ("input", "output")
# largest |bias / weight|: the part of the output that says nothing of the input, and whose rounding error stays
_LIMITS = {torch.bfloat16: 8.0, torch.float16: 64.0, torch.float32: 1024.0, torch.float64: 2.0**20}


class InvertibleError(GradstowError, ValueError):
    """A norm's input cannot be made again from its output: a weight is zero or not finite, or its bias is more than
    8 (bfloat16), 64 (float16), 1024 (float32) or 2**20 (float64) times as large."""


class DoubleBackwardError(GradstowError, RuntimeError):
    """A gradient that cannot be differentiated again."""


def check_saves(saves: str) -> None:
    if saves not in _SAVES:
        raise PolicyError(f'a norm cannot save {saves!r} for its backward. Write saves="input" or saves="output".')


def refuse_double_backward(saves: str) -> None:
    if saves == "output":
        raise DoubleBackwardError(
            "a gradient of a norm that keeps its output cannot be differentiated again (create_graph=True): its input "
            'is gone. Use saves="input" there.'
        )


def normalised(y: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """``(y - bias) / weight``."""
    if bias is not None:
        y = y - bias
    return y if weight is None else y / weight


def _checked(
    rstd: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    if weight is None:
        return rstd.clone()
    limit = _LIMITS[dtype]
    offset = torch.zeros_like(weight) if bias is None else bias
    good = weight.ne(0) & weight.isfinite() & (offset.abs() <= limit * weight.abs())
    if not bool(good.all()):
        raise InvertibleError(
            f"the output of a norm does not tell its input: {int((~good).sum())} of {good.numel()} weights are 0, or "
            f'their bias is more than {limit:g} times as large (the limit for {dtype}). Use saves="input".'
        )
    return rstd.clone()  # an operator must not return what it was given


checked = _bits.register(
    "checked_invertible(Tensor rstd, Tensor? weight, Tensor? bias, ScalarType dtype) -> Tensor",
    _checked,
    lambda rstd, *_: torch.empty_like(rstd),
)
