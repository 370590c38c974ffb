"""Operators of our own, registered with torch so that graphs, the cost table and CUDA see them as ops.

``gradstow::batch_norm_apply`` normalises with statistics that are already known. It calls torch's own
inference kernel with variance 1, epsilon 0 and weight ``w * invstd``: that kernel then computes the same
``alpha`` and ``beta`` from the same numbers as the training kernel did, so the result is bit-equal, without
the passes for the statistics (measured on CPU: a quarter of the time).

``gradstow::keep_mask`` draws a dropout mask as eager does on CPU: in the memory layout of its input, which
decides the order of the random numbers. (``aten.bernoulli.p`` draws a contiguous one.)
``gradstow::masked_scale`` applies it inside the memory of its result, where the product of a float and a bool
tensor would take a float copy of the mask on top.

``gradstow::pack_bits`` and ``unpack_bits`` turn bools into bits and back, in the order of their memory. Eight bools
are read as one 64-bit number: a product gathers their bits in its highest byte. Back, a table of 256 such numbers is
looked up. ``gradstow::above_bits`` packs ``x > limit``; ``gradstow::zero_by_bits`` is ReLU's gradient from that.
``gradstow::max_pool_backward`` is max-pooling's gradient without the pooled tensor, of which torch's reads the sizes.

``gradstow::recurrent_step`` runs an LSTM, GRU or RNN forward and backward and returns nothing, so that its working
memory is all that the call needs in a training step. Only the cost table calls it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

VERSION = 2  # raise it when an operator changes: measured costs of the old one are then forgotten

_LIBRARY = torch.library.Library("gradstow", "DEF")
_LIBRARY.define("batch_norm_apply(Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd) -> Tensor")
_LIBRARY.define("keep_mask(Tensor x, float keep) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_LIBRARY.define("masked_scale(Tensor x, Tensor mask, float scale) -> Tensor")
_LIBRARY.define("pack_bits(Tensor mask) -> Tensor")
_LIBRARY.define("unpack_bits(Tensor code, int[] size, int[] stride) -> Tensor")
_LIBRARY.define("above_bits(Tensor x, float limit) -> Tensor")
_LIBRARY.define("zero_by_bits(Tensor gradient, Tensor code) -> Tensor")
_LIBRARY.define("zero_by_bits_(Tensor(a!) gradient, Tensor code) -> Tensor(a!)")
_LIBRARY.define(
    "max_pool_backward(Tensor gradient, Tensor indices, int[] size, int[] kernel, int[] stride, int[] padding, "
    "int[] dilation, bool ceil_mode) -> Tensor"
)
_LIBRARY.define(
    "recurrent_step(str kind, Tensor x, Tensor[] states, Tensor[] weights, bool biases, int layers, float dropout, "
    "bool train, bool both_ways, bool batch_first) -> ()"
)


def _batch_norm_apply(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
) -> torch.Tensor:
    alpha = invstd if weight is None else weight * invstd
    one = torch.ones_like(invstd)
    return torch.ops.aten._native_batch_norm_legit_no_training.default(x, alpha, bias, mean, one, 0.0, 0.0)[0]


def _keep_mask(x: torch.Tensor, keep: float) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.bool).bernoulli_(keep)


def _masked_scale(x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    if mask.stride() != x.stride():  # the result's layout must be that of eager's product
        return x.mul(mask).mul_(scale)
    return mask.to(x.dtype).mul_(scale).mul_(x)


# byte i of a number, 0 or 1, times the power here lands on bit 56 + i, and no two products share a bit
_GATHER = sum(1 << (56 - 7 * i) for i in range(8))
_BYTES = 8
_CHUNK = 1 << 18  # elements, a multiple of 8


@functools.cache
def _spread(device: torch.device) -> torch.Tensor:
    """For each byte its eight bits as eight bools, read as one 64-bit number."""
    numbers = torch.arange(256).unsqueeze(1)
    bits = (numbers >> torch.arange(_BYTES)) & 1
    return bits.to(torch.uint8).view(torch.int64).flatten().to(device)


def _pack_bits(mask: torch.Tensor) -> torch.Tensor:
    flat = mask.as_strided((mask.numel(),), (1,))
    whole = mask.numel() // _BYTES
    code = mask.new_empty(-(-mask.numel() // _BYTES), dtype=torch.uint8)
    code[:whole] = _gathered(flat[: whole * _BYTES])
    if mask.numel() % _BYTES:
        last = flat.new_zeros(_BYTES)
        last[: mask.numel() % _BYTES] = flat[whole * _BYTES :]
        code[whole:] = _gathered(last)
    return code


def _gathered(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.int64).mul(_GATHER).bitwise_right_shift_(56)


def _unpack_bits(code: torch.Tensor, size: list[int], stride: list[int]) -> torch.Tensor:
    mask = torch.empty_strided(size, stride, dtype=torch.bool, device=code.device)
    _check_length(code, mask.numel())
    flat = mask.as_strided((mask.numel(),), (1,))
    whole, table = mask.numel() // _BYTES, _spread(code.device)
    if whole:
        torch.index_select(table, 0, code[:whole].int(), out=flat[: whole * _BYTES].view(torch.int64))
    if mask.numel() % _BYTES:
        last = table.index_select(0, code[whole:].int()).view(torch.bool)
        flat[whole * _BYTES :] = last[: mask.numel() % _BYTES]
    return mask


def _check_length(code: torch.Tensor, numel: int) -> None:
    if code.numel() != -(-numel // _BYTES):
        raise ValueError(f"{code.numel()} bytes of bits do not fit {numel} elements")


def _above_bits(x: torch.Tensor, limit: float) -> torch.Tensor:
    return _pack_bits(x.le(limit)).bitwise_not_()  # so that NaN counts as above, as ReLU's gradient has it


def _zero_by_bits(gradient: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
    return _zeroed_into(torch.empty_like(gradient), gradient, code)


def _zero_by_bits_(gradient: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
    return _zeroed_into(gradient, gradient, code)


def _zeroed_into(result: torch.Tensor, gradient: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
    """By ReLU's own kernel, some at a time: nothing else is as fast, and it wants numbers of the gradient's type."""
    numel = gradient.numel()
    _check_length(code, numel)
    source, target = (t.as_strided((numel,), (1,)) for t in (gradient, result))
    size = _CHUNK if gradient.device.type == "cpu" else max(numel, _BYTES)
    for start in range(0, numel, size):
        end = min(start + size, numel)
        bits = code[start // _BYTES : -(-end // _BYTES)]
        stand_in = _unpack_bits(bits, [end - start], [1]).to(gradient.dtype)
        part = target[start:end]
        torch.ops.aten.threshold_backward.grad_input(source[start:end], stand_in, 0.0, grad_input=part)
    return result


def _max_pool_backward(
    gradient: torch.Tensor,
    indices: torch.Tensor,
    size: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
) -> torch.Tensor:
    pooled = gradient.new_zeros(()).expand(size)
    backward = torch.ops.aten.max_pool2d_with_indices_backward.default
    return backward(gradient, pooled, kernel, stride, padding, dilation, ceil_mode, indices)


def _recurrent_step(
    kind: str, x: torch.Tensor, states: list[torch.Tensor], weights: list[torch.Tensor], *options: Any
) -> None:
    with torch.enable_grad():
        x, states, weights = x.detach(), [s.detach() for s in states], [w.detach() for w in weights]
        for tensor in (x, *states, *weights):
            tensor.requires_grad_()
        given = tuple(states) if kind == "lstm" else states[0]
        outputs = getattr(torch, kind)(x, given, weights, *options)
        torch.autograd.grad(outputs, [x, *states, *weights], [torch.ones_like(o) for o in outputs])


_IMPLEMENTED = {
    "batch_norm_apply": _batch_norm_apply,
    "keep_mask": _keep_mask,
    "masked_scale": _masked_scale,
    "pack_bits": _pack_bits,
    "unpack_bits": _unpack_bits,
    "above_bits": _above_bits,
    "zero_by_bits": _zero_by_bits,
    "zero_by_bits_": _zero_by_bits_,
    "max_pool_backward": _max_pool_backward,
}
for _name, _function in _IMPLEMENTED.items():
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
_LIBRARY.impl("recurrent_step", _recurrent_step, "CompositeImplicitAutograd")


def _packed_shape(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(-(-x.numel() // _BYTES), dtype=torch.uint8)


def _unpacked_shape(code: torch.Tensor, size: list[int], stride: list[int]) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=torch.bool, device=code.device)


# Under fake tensors the real ones would build, and keep, a table of fakes.
_ON_FAKES: dict[str, Callable[..., torch.Tensor]] = {
    "pack_bits": _packed_shape,
    "above_bits": _packed_shape,
    "unpack_bits": _unpacked_shape,
    "zero_by_bits": lambda gradient, _code: torch.empty_like(gradient),
    "zero_by_bits_": lambda gradient, _code: gradient,
}
for _name, _shape in _ON_FAKES.items():
    torch.library.register_fake(f"gradstow::{_name}", _shape, lib=_LIBRARY)
batch_norm_apply = torch.ops.gradstow.batch_norm_apply.default
keep_mask = torch.ops.gradstow.keep_mask.default
masked_scale = torch.ops.gradstow.masked_scale.default
pack_bits = torch.ops.gradstow.pack_bits.default
unpack_bits = torch.ops.gradstow.unpack_bits.default
above_bits = torch.ops.gradstow.above_bits.default
zero_by_bits = torch.ops.gradstow.zero_by_bits.default
zero_by_bits_ = torch.ops.gradstow.zero_by_bits_.default
max_pool_backward = torch.ops.gradstow.max_pool_backward.default
