"""Parameter groups for decoupled weight decay: norms and biases are left out of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from gradstow._errors import GradstowError

KINDS = ("norm", "bias", "embedding", "vector")
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def parameter_groups(
    model: nn.Module, weight_decay: float, *, no_decay: Sequence[str] = ("norm", "bias")
) -> list[dict[str, Any]]:
    """Two groups for an optimizer with decoupled weight decay (AdamW, SGDW, LARS, LAMB): with decay, and without.

    Every parameter with ``requires_grad`` is in exactly one of them, in the model's order; frozen ones are in none.
    One that several modules share is left out of the decay where any of its places is. A group without parameters is
    not returned.

    Args:
        weight_decay: for the first group; the second one has 0.
        no_decay: what is left out: ``"norm"`` (parameters of normalisation layers: torch's, and modules whose class is
            called ...Norm), ``"bias"``, ``"embedding"`` (lookup tables), ``"vector"`` (at most one dimension), or globs
            over parameter names such as ``"*.pos_embed"``.

    Returns:
        What an optimizer takes: ``torch.optim.AdamW(parameter_groups(model, 0.05), lr=1e-3)``.

    Raises:
        GradstowError: a negative or infinite decay, a glob that no parameter matches, or a model without parameters to
            train.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019.
    """
    if not (math.isfinite(weight_decay) and weight_decay >= 0):
        raise GradstowError(f"weight_decay={weight_decay!r} is not a finite number of at least 0. 0.05 is usual.")
    chosen = (no_decay,) if isinstance(no_decay, str) else tuple(no_decay)
    _check_globs(model, chosen)
    spared: dict[nn.Parameter, bool] = {}
    for module, path, name, parameter in _places(model):
        if parameter.requires_grad:
            here = any(_is(item, module, path, name, parameter) for item in chosen)
            spared[parameter] = spared.get(parameter, False) or here
    if not spared:
        raise GradstowError(
            f"{type(model).__name__} has no trainable parameters to group. Set requires_grad_(True) on what is trained."
        )
    parts = (
        {"params": [p for p, without in spared.items() if not without], "weight_decay": float(weight_decay)},
        {"params": [p for p, without in spared.items() if without], "weight_decay": 0.0},
    )
    return [part for part in parts if part["params"]]


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Parameter]]:
    """Every place at which a parameter stands: its module, full name and own name."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield module, f"{path}.{name}" if path else name, name, parameter


def _is(kind: str, module: nn.Module, path: str, name: str, parameter: torch.Tensor) -> bool:
    if kind == "norm":
        return isinstance(module, _NORMS) or "norm" in type(module).__name__.lower()
    if kind == "bias":  # also in_proj_bias of attention, and bias_ih_l0 of recurrent layers
        return "bias" in name.split("_")
    if kind == "embedding":
        return isinstance(module, _EMBEDDINGS)
    if kind == "vector":
        return parameter.dim() <= 1
    return fnmatchcase(path, kind)


def _check_globs(model: nn.Module, chosen: tuple[str, ...]) -> None:
    names = [path for _, path, _, _ in _places(model)]
    for item in chosen:
        if item not in KINDS and not any(fnmatchcase(name, item) for name in names):
            raise GradstowError(
                f"no_decay={item!r} matches no parameter of {type(model).__name__}, whose first is {names[:1]}. "
                f"Give some of {KINDS}, or globs over parameter names."
            )
