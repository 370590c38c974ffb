"""Triton kernels for CUDA. Triton is only imported when one of them runs."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import torch

NAMES = ("layer_norm", "cross_entropy")

# A kernel runs by default once a benchmark on CUDA shows that it wins; none has run yet.
_ENABLED: set[str] = set()


@contextlib.contextmanager
def using(*names: str) -> Iterator[None]:
    """Let these kernels run: on CUDA tensors, and under TRITON_INTERPRET=1 on those of the CPU too."""
    unknown = set(names) - set(NAMES)
    if unknown:
        raise ValueError(f"there are no kernels {sorted(unknown)}; there are {', '.join(NAMES)}")
    before = set(_ENABLED)
    _ENABLED.update(names)
    try:
        yield
    finally:
        _ENABLED.clear()
        _ENABLED.update(before)


def wanted(name: str, x: torch.Tensor) -> bool:
    """Whether this kernel runs for ``x``: it is enabled, Triton is there, and the type is one that it takes."""
    if name not in _ENABLED or not available():
        return False
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    return x.dtype in kinds and (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")


@functools.cache
def available() -> bool:
    return importlib.util.find_spec("triton") is not None


def layer_norm_forward(*given: Any) -> Any:
    return _run("_layer_norm", "forward", given)


def layer_norm_backward(*given: Any) -> Any:
    return _run("_layer_norm", "backward", given)


def cross_entropy_forward(*given: Any) -> Any:
    return _run("_cross_entropy", "forward", given)


def cross_entropy_backward(*given: Any) -> Any:
    return _run("_cross_entropy", "backward", given)


def _run(module: str, function: str, given: tuple[Any, ...]) -> Any:
    return getattr(importlib.import_module(f"{__name__}.{module}"), function)(*given)
