"""PyTorch's own sample inputs. Its test package imports ``expecttest``, which they do not need."""

from __future__ import annotations

import sys
import types
import unittest
from collections.abc import Iterator
from typing import Any

import torch


def _tables() -> tuple[Any, Any]:
    stand_in: Any = types.SimpleNamespace(TestCase=unittest.TestCase, ACCEPT=False)
    missing = "expecttest" not in sys.modules
    try:
        import expecttest  # noqa: F401
    except ImportError:
        sys.modules["expecttest"] = stand_in
    try:
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.common_modules import module_db
    finally:
        if missing and sys.modules.get("expecttest") is stand_in:
            del sys.modules["expecttest"]
    return op_db, module_db


def op_samples(name: str, dtype: torch.dtype) -> Iterator[Any]:
    """Samples with ``input``, ``args`` and ``kwargs``, whose tensors require gradients."""
    for op in _tables()[0]:
        if op.name == name:
            yield from op.sample_inputs("cpu", dtype, requires_grad=True)


def module_samples(kind: type, dtype: torch.dtype = torch.float32) -> Iterator[Any]:
    """Samples with ``constructor_input`` and ``forward_input``, each with ``args`` and ``kwargs``."""
    for info in _tables()[1]:
        if info.module_cls is kind:
            yield from info.module_inputs_func(info, "cpu", dtype, True, True)
