"""Memory layouts that torch's fake kernels get wrong, as the real ones make them: views of the results would fail."""

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

# How the first result lies on CPU (found by comparing): contiguous or channels last, as this argument is;
_FORMAT_OF = {
    aten.native_group_norm.default: 0,
    aten.native_group_norm_backward.default: 1,
    aten.native_batch_norm.default: 0,
    aten._native_batch_norm_legit.default: 0,
    aten._native_batch_norm_legit.no_stats: 0,
    aten._native_batch_norm_legit_functional.default: 0,
    aten.native_batch_norm_backward.default: 1,
}
# in the order of this argument's dimensions;
_STRIDES_OF = {
    aten.binary_cross_entropy.default: 0,
    aten.elu_backward.default: 0,
    aten.hardsigmoid_backward.default: 0,
    aten.hardswish_backward.default: 0,
    aten.hardtanh_backward.default: 0,
    aten.softplus_backward.default: 0,
}
# or contiguous, whatever the arguments are.
_CONTIGUOUS = (
    aten._log_softmax_backward_data.default,
    aten.huber_loss_backward.default,
    aten.mse_loss_backward.default,
    aten.native_layer_norm_backward.default,
    aten.smooth_l1_loss_backward.default,
)
_OPS = (*_FORMAT_OF, *_STRIDES_OF, *_CONTIGUOUS)


def _like_real(mode: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    with mode:
        result = decomposition_table[op](*args, **kwargs)
        if isinstance(result, torch.Tensor):
            return _laid_out(op, result, args)
        first, *rest = result
        return (first if first is None else _laid_out(op, first, args), *rest)


def _laid_out(op: Any, first: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    if first.device.type != "cpu":
        return first
    if op in _FORMAT_OF:
        return torch.empty_like(first, memory_format=suggest_memory_format(args[_FORMAT_OF[op]]))
    if op in _CONTIGUOUS:
        return torch.empty_like(first, memory_format=torch.contiguous_format)
    given = args[_STRIDES_OF[op]]
    return torch.empty_like(given, dtype=first.dtype) if given.shape == first.shape else first


@contextlib.contextmanager
def real_layouts() -> Iterator[None]:
    """Inside, fakes of these ops have the strides of the real ones."""
    with (
        mock.patch.dict(fake_impls.op_implementations_dict, dict.fromkeys(_OPS, _like_real)),
        mock.patch.dict(meta_table, dict.fromkeys(_OPS)),  # ops that are not in there are decomposed before
    ):
        yield
