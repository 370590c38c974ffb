"""Modules whose output for one sample depends on the other samples: splitting a batch changes what they compute."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from gradstow._errors import GradstowError

_NAMES = ("BatchNorm", "BatchRenorm", "SpectralNorm")
Named = tuple[tuple[str, torch.nn.Module], ...]


def may_couple(model: torch.nn.Module) -> Named:
    """The modules that couple samples in some mode, by name.

    These are torch's BatchNorms and what else keeps running statistics; classes with "BatchNorm", "BatchRenorm" or
    "SpectralNorm" (one step of its iteration per forward) in their name, and no "Frozen"; and modules with a true
    attribute ``couples_samples``; a false one declares that a module does not.
    """
    return tuple((name, module) for name, module in model.named_modules() if _is_candidate(module))


def coupled_now(candidates: Iterable[tuple[str, torch.nn.Module]]) -> str:
    """The first module that couples samples in its present mode, as text; empty where none does."""
    for name, module in candidates:
        if _couples(module):
            return f"{type(module).__name__} {name}".strip()
    return ""


def check_splittable(coupled: str, size: int, micro_batch: int) -> None:
    """Raises GradstowError where ``coupled`` names something."""
    if not coupled:
        return
    raise GradstowError(
        f"the batch of {size} samples cannot be split into micro-batches of {micro_batch} without changing the result: "
        f"{coupled} mixes the samples of a batch. Train it whole (micro_batch=None), freeze the statistics of "
        "normalisation layers with .eval(), or accept other numbers with allow_coupled=True."
    )


def _is_candidate(module: torch.nn.Module) -> bool:
    said = getattr(module, "couples_samples", None)
    if said is not None:
        return bool(said)
    names = " ".join(kind.__name__ for kind in type(module).__mro__)
    if "Frozen" in names:
        return False
    tracked = isinstance(module, _NormBase) and module.track_running_stats  # an InstanceNorm's, too
    return isinstance(module, _BatchNorm) or tracked or any(word in names for word in _NAMES)


def _couples(module: torch.nn.Module) -> bool:
    if module.training:
        return True
    # Without running statistics a BatchNorm takes the batch's own in eval mode, too.
    return isinstance(module, _BatchNorm) and module.running_mean is None and module.running_var is None
