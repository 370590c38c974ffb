"""Operators of our own, registered with torch so that graphs, the cost table and CUDA see them as ops.

``gradstow::batch_norm_apply`` normalises with statistics that are already known. It calls torch's own
inference kernel with variance 1, epsilon 0 and weight ``w * invstd``: that kernel then computes the same
``alpha`` and ``beta`` from the same numbers as the training kernel did, so the result is bit-equal, without
the passes for the statistics (measured on CPU: a quarter of the time).

``gradstow::keep_mask`` draws a dropout mask as eager does on CPU: in the memory layout of its input, which
decides the order of the random numbers. (``aten.bernoulli.p`` draws a contiguous one.)
``gradstow::masked_scale`` applies it inside the memory of its result, where the product of a float and a bool
tensor would take a float copy of the mask on top.

``gradstow::recurrent_step`` runs an LSTM, GRU or RNN forward and backward and returns nothing, so that its working
memory is all that the call needs in a training step. Only the cost table calls it.
"""

from __future__ import annotations

from typing import Any

import torch

VERSION = 1  # raise it when an operator changes: measured costs of the old one are then forgotten

_LIBRARY = torch.library.Library("gradstow", "DEF")
_LIBRARY.define("batch_norm_apply(Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd) -> Tensor")
_LIBRARY.define("keep_mask(Tensor x, float keep) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_LIBRARY.define("masked_scale(Tensor x, Tensor mask, float scale) -> Tensor")
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


_LIBRARY.impl("batch_norm_apply", _batch_norm_apply, "CompositeExplicitAutograd")
_LIBRARY.impl("keep_mask", _keep_mask, "CompositeExplicitAutograd")
_LIBRARY.impl("masked_scale", _masked_scale, "CompositeExplicitAutograd")
_LIBRARY.impl("recurrent_step", _recurrent_step, "CompositeImplicitAutograd")
batch_norm_apply = torch.ops.gradstow.batch_norm_apply.default
keep_mask = torch.ops.gradstow.keep_mask.default
masked_scale = torch.ops.gradstow.masked_scale.default
