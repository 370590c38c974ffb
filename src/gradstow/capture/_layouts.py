"""Memory layouts that torch's fake kernels get wrong, as the real ones make them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._decomp import decomposition_table, meta_table
from torch._prims_common import suggest_memory_format
from torch._subclasses import fake_impls

aten = torch.ops.aten

# The first result lies like this argument on CPU; the fake one is always contiguous, and views of it then fail.
_LIKE = {aten.native_group_norm.default: 0, aten.native_group_norm_backward.default: 1}


def _like_real(mode: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    given = args[_LIKE[op]]
    with mode:
        first, *rest = decomposition_table[op](*args, **kwargs)
        if first is not None and given.device.type == "cpu":
            first = torch.empty_like(first, memory_format=suggest_memory_format(given))
    return (first, *rest)


@contextlib.contextmanager
def real_layouts() -> Iterator[None]:
    """Inside, fakes of these ops have the strides of the real ones."""
    with (
        mock.patch.dict(fake_impls.op_implementations_dict, dict.fromkeys(_LIKE, _like_real)),
        mock.patch.dict(meta_table, dict.fromkeys(_LIKE)),  # ops that are not in there are decomposed before
    ):
        yield
