"""Norms of gradients, dense and sparse, of any float type and on several devices; and scaling by them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

EPS = 1e-6  # torch.nn.utils.clip_grad_norm_'s
_WIDE = {torch.float32, torch.float64}


def with_gradients(parameters: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Those that have a gradient with numbers in it, each once."""
    return [p for p in dict.fromkeys(parameters) if p.grad is not None and values_of(p).numel() > 0]


@torch.no_grad()
def values_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The numbers of its gradient as a dense tensor that shares their memory; a sparse one is coalesced for good."""
    grad = parameter.grad
    assert grad is not None, "asked for only where there is one"
    if grad.layout is torch.strided:
        return grad
    if grad.layout is torch.sparse_coo and not grad.is_coalesced():
        grad = parameter.grad = grad.coalesce()
    return grad.values()


@torch.no_grad()
def total_norm(parameters: Sequence[torch.nn.Parameter], norm_type: float) -> torch.Tensor:
    """The norm of all gradients as one vector, on the device of the first; 0 where there are none.

    In float32 for shorter floats: their own norms overflow (fp16) or have 8 bits (bf16).
    """
    values = [values_of(p) for p in parameters]
    if len({v.dtype for v in values}) == 1 and values[0].dtype in _WIDE:
        return get_total_norm(values, norm_type)
    return together([norm_of(v, norm_type) for v in values], norm_type)


@torch.no_grad()
def norm_of(values: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The norm of one gradient, as in ``total_norm``."""
    if values.dtype in _WIDE or values.is_complex():
        return torch.linalg.vector_norm(values, norm_type)
    return torch.linalg.vector_norm(values, norm_type, dtype=torch.float32)


@torch.no_grad()
def together(norms: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm of a vector of which these are the norms of the parts, whatever order they came in, bit for bit."""
    if not norms:
        return torch.tensor(0.0)
    widest = max((n.dtype for n in norms), key=lambda dtype: dtype.itemsize)
    stacked = torch.stack([n.to(norms[0].device, widest) for n in norms])
    return torch.linalg.vector_norm(stacked.sort().values, norm_type)


@torch.no_grad()
def scale(parameters: Sequence[torch.nn.Parameter], max_norm: float, norm: torch.Tensor) -> None:
    """Scale the gradients in place by max_norm / norm where that is under 1 and finite, without waiting for the
    device."""
    clip_grads_with_norm_([p for p in parameters if _is_dense(p)], max_norm, _finite(norm))
    for parameter in parameters:
        if not _is_dense(parameter):
            values = values_of(parameter)
            values.mul_(factor_of(max_norm, norm).to(values.device))


def factor_of(max_norm: float, norm: torch.Tensor) -> torch.Tensor:
    """What ``scale`` multiplies by, as torch computes it."""
    return torch.clamp(max_norm / (_finite(norm) + EPS), max=1.0)


@torch.no_grad()
def replace(parameter: torch.nn.Parameter, factor: torch.Tensor | float) -> None:
    """Give it a scaled copy of its gradient.

    Inside a backward the gradient's memory may be that of a gradient which other nodes are still to read: autograd
    hands views of one tensor to several of them, and a parameter takes such a view over as its ``.grad``.
    """
    values, grad = values_of(parameter), parameter.grad
    assert grad is not None, "asked for only where there is one"
    scaled = values * factor
    if grad.layout is torch.sparse_coo:
        scaled = torch.sparse_coo_tensor(grad.indices(), scaled, grad.shape, is_coalesced=True, check_invariants=False)
    elif grad.layout is not torch.strided:
        scaled = grad * factor
    parameter.grad = scaled


def _finite(norm: torch.Tensor) -> torch.Tensor:
    return torch.where(norm.isfinite(), norm, torch.zeros_like(norm))


def _is_dense(parameter: torch.nn.Parameter) -> bool:
    return parameter.grad is not None and parameter.grad.layout is torch.strided
