"""Where a kernel is started."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def on_device(x: torch.Tensor) -> Any:
    """Triton starts kernels on the current device, which need not be that of ``x``."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
