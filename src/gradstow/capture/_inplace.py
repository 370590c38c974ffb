"""Which ops can write their result over a dying input, bit for bit as if they had not.

All are elementwise: each output element reads only the input elements at its own place, so the kernel
is the same one, called through the in-place or the ``out=`` overload.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from gradstow._ops import zero_by_bits, zero_by_bits_
from gradstow.capture._normalize import UNSURE

aten = torch.ops.aten

# op → its in-place twin, which writes over the first argument
_FIRST = {
    aten.relu.default: aten.relu_.default,
    aten.tanh.default: aten.tanh_.default,
    aten.sigmoid.default: aten.sigmoid_.default,
    aten.silu.default: aten.silu_.default,
    aten.gelu.default: aten.gelu_.default,
    aten.leaky_relu.default: aten.leaky_relu_.default,
    aten.hardtanh.default: aten.hardtanh_.default,
    aten.hardswish.default: aten.hardswish_.default,
    aten.hardsigmoid.default: aten.hardsigmoid_.default,
    aten.elu.default: aten.elu_.default,
    aten.neg.default: aten.neg_.default,
    aten.exp.default: aten.exp_.default,
    aten.sqrt.default: aten.sqrt_.default,
    aten.rsqrt.default: aten.rsqrt_.default,
    aten.add.Tensor: aten.add_.Tensor,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.div.Tensor: aten.div_.Tensor,
    aten.add.Scalar: aten.add_.Scalar,
    aten.sub.Scalar: aten.sub_.Scalar,
    aten.mul.Scalar: aten.mul_.Scalar,
    aten.div.Scalar: aten.div_.Scalar,
    aten.pow.Tensor_Scalar: aten.pow_.Scalar,
    aten.clamp.default: aten.clamp_.default,
    aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
    zero_by_bits: zero_by_bits_,
}
# commutative ops may write over the second argument too
_SECOND = {aten.add.Tensor: aten.add_.Tensor, aten.mul.Tensor: aten.mul_.Tensor}
# backward ops that take the gradient first and write into grad_input
_GRADIENT = {
    aten.threshold_backward.default: (aten.threshold_backward.grad_input, "grad_input"),
    aten.tanh_backward.default: (aten.tanh_backward.grad_input, "grad_input"),
    aten.sigmoid_backward.default: (aten.sigmoid_backward.grad_input, "grad_input"),
    aten.silu_backward.default: (aten.silu_backward.grad_input, "grad_input"),
    aten.gelu_backward.default: (aten.gelu_backward.grad_input, "grad_input"),
    aten.leaky_relu_backward.default: (aten.leaky_relu_backward.grad_input, "grad_input"),
    aten.hardtanh_backward.default: (aten.hardtanh_backward.grad_input, "grad_input"),
    aten.elu_backward.default: (aten.elu_backward.grad_input, "grad_input"),
}
# softmax's gradient along the last, contiguous dimension: each row is summed up first and written after that.
# Only on CPU, where the kernel works row by row.
_ROWS = {
    aten._log_softmax_backward_data.default: (aten._log_softmax_backward_data.out, "out"),
    aten._softmax_backward_data.default: (aten._softmax_backward_data.out, "grad_input"),
}


def overwritable(node: fx.Node) -> tuple[fx.Node, ...]:
    """The inputs of ``node`` whose memory its output could take over, were they dying."""
    result = node.meta.get("val")
    if not isinstance(result, torch.Tensor) or UNSURE in node.meta:
        return ()
    slots = []
    if node.target in _FIRST or node.target in _GRADIENT or _is_row_wise(node, result):
        slots.append(0)
    if node.target in _SECOND and node.kwargs.get("alpha", 1) == 1:
        slots.append(1)
    inputs = [node.args[i] for i in slots if i < len(node.args)]
    others = [a for a in node.args if isinstance(a, fx.Node)]
    if _ambiguous(result) and not all(_canonical(a.meta.get("val")) for a in others):
        return ()
    return tuple(
        i
        for i in inputs
        if isinstance(i, fx.Node)
        and _same_layout(i.meta.get("val"), result)
        and others.count(i) == 1
        and not any(_share(i, other) for other in others if other is not i)
    )


def _ambiguous(value: torch.Tensor) -> bool:
    """Whether images are one pixel wide or have one channel: several strides then mean the same, the result's own are
    the canonical ones whatever the inputs' are, and kernels that come later choose their way by them."""
    return value.dim() >= 4 and 1 in value.shape[1:]


def _canonical(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.stride() == torch.empty(value.shape, device="meta").stride()


def _share(one: fx.Node, other: fx.Node) -> bool:
    """Whether two inputs lie on one storage (a matrix and its transpose): then neither may be written over."""
    a, b = one.meta.get("val"), other.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def overwriting_call(node: fx.Node, victim: fx.Node) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Target, args and kwargs that compute ``node`` into the memory of its input ``victim``."""
    args, kwargs = node.args, dict(node.kwargs)
    written = _GRADIENT.get(node.target) or _ROWS.get(node.target)
    if written is not None:
        target, name = written
        return target, args, {**kwargs, name: victim}
    if args[0] is victim:
        return _FIRST[node.target], args, kwargs
    return _SECOND[node.target], (args[1], args[0], *args[2:]), kwargs


def _is_row_wise(node: fx.Node, result: torch.Tensor) -> bool:
    if node.target not in _ROWS or result.device.type != "cpu" or not result.is_contiguous():
        return False
    return node.args[2] in (-1, result.dim() - 1) and node.args[3] == result.dtype


def _same_layout(value: Any, result: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and bool(
        all(stride for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1)  # not expanded
        and not (value.is_complex() or value.is_neg())  # lazy conjugates and negatives stay marked as such
        and value.dtype == result.dtype
        and value.shape == result.shape
        and value.stride() == result.stride()
        and value.device == result.device
        and value.storage_offset() == 0
        and value.untyped_storage().nbytes() == value.numel() * value.element_size()
    )
