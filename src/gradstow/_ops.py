"""Operators of our own, registered with torch so that graphs, the cost table and CUDA see them as ops.

``gradstow::batch_norm_apply`` normalises with statistics that are already known. It calls torch's own
inference kernel with variance 1, epsilon 0 and weight ``w * invstd``: that kernel then computes the same
``alpha`` and ``beta`` from the same numbers as the training kernel did, so the result is bit-equal, without
the passes for the statistics (measured on CPU: a quarter of the time).

``gradstow::keep_mask`` draws a dropout mask as eager does on CPU: in the memory layout of its input, which
decides the order of the random numbers. (``aten.bernoulli.p`` draws a contiguous one.)
``gradstow::masked_scale`` applies it inside the memory of its result, where the product of a float and a bool
tensor would take a float copy of the mask on top.
"""

from __future__ import annotations

import torch

VERSION = 1  # raise it when an operator changes: measured costs of the old one are then forgotten

_LIBRARY = torch.library.Library("gradstow", "DEF")
_LIBRARY.define("batch_norm_apply(Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd) -> Tensor")
_LIBRARY.define("keep_mask(Tensor x, float keep) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_LIBRARY.define("masked_scale(Tensor x, Tensor mask, float scale) -> Tensor")


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


_LIBRARY.impl("batch_norm_apply", _batch_norm_apply, "CompositeExplicitAutograd")
_LIBRARY.impl("keep_mask", _keep_mask, "CompositeExplicitAutograd")
_LIBRARY.impl("masked_scale", _masked_scale, "CompositeExplicitAutograd")
batch_norm_apply = torch.ops.gradstow.batch_norm_apply.default
keep_mask = torch.ops.gradstow.keep_mask.default
masked_scale = torch.ops.gradstow.masked_scale.default
