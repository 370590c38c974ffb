"""Which torch module has which lean form, and what that keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from gradstow.layers import _activations, _attention, _conv, _dropout, _fused, _linear, _norms, _pooling


@dataclass(frozen=True)
class _Form:
    lean: type[nn.Module]
    keeps: str
    default: bool = True  # swapped when nobody says what to swap


_OUTPUT = "its output, which costs nothing where the next layer keeps it"
_MASK = "one bit per element"
_ROWS = "input and statistics in float32; weight gradients added up in float32"
_RUN = "one tensor per run of conv or linear, norm and activation, some of which run again"
_SAME = "what torch keeps; with activation= no pre-activation"

# settings of lean forms; where a module has one of that name, it is its own
_SETTINGS = frozenset({"saves", "keep", "fold", "activation", "chunk"})
_FORMS: dict[type[nn.Module], _Form] = {
    nn.ReLU: _Form(_activations.ReLU, _OUTPUT),
    nn.ReLU6: _Form(_activations.ReLU6, _OUTPUT),
    nn.LeakyReLU: _Form(_activations.LeakyReLU, _OUTPUT),
    nn.Hardtanh: _Form(_activations.Hardtanh, _OUTPUT),
    nn.Hardsigmoid: _Form(_activations.Hardsigmoid, _MASK),
    nn.LogSigmoid: _Form(_activations.LogSigmoid, "its input"),
    nn.Softsign: _Form(_activations.Softsign, "its input"),
    nn.Dropout: _Form(_dropout.Dropout, _MASK),
    nn.MaxPool1d: _Form(_pooling.MaxPool1d, "4 or 8 bits per output"),
    nn.MaxPool2d: _Form(_pooling.MaxPool2d, "4 or 8 bits per output"),
    nn.LayerNorm: _Form(_norms.LayerNorm, _ROWS),
    nn.RMSNorm: _Form(_norms.RMSNorm, _ROWS),
    nn.GroupNorm: _Form(_norms.GroupNorm, _ROWS),
    nn.MultiheadAttention: _Form(_attention.Attention, "query, key, value, output and one number per row"),
    nn.Sequential: _Form(_fused.FusedSequential, _RUN),
    nn.Linear: _Form(_linear.Linear, _SAME, default=False),
    nn.Conv1d: _Form(_conv.Conv1d, _SAME, default=False),
    nn.Conv2d: _Form(_conv.Conv2d, _SAME, default=False),
    nn.Conv3d: _Form(_conv.Conv3d, _SAME, default=False),
}


def why_not(module: nn.Module, *, asked: bool) -> str | None:
    """Why a module is not swapped: None if it is, "" if it has no lean form at all (or none that is wanted)."""
    kind = _kind(module)
    if kind is None:
        relative = next((base for base in type(module).__mro__ if base in _FORMS and base is not nn.Sequential), None)
        wanted = relative is not None and (asked or _FORMS[relative].default)
        if relative is None or not wanted or type(module).__module__.startswith("gradstow."):
            return ""
        return f"{type(module).__name__} is not exactly torch's {relative.__name__}"
    if not asked and not _FORMS[kind].default:
        return ""
    if "forward" in module.__dict__:
        return "its forward was replaced"
    own = _SETTINGS.intersection(module.__dict__)
    if own:
        return f"it has an attribute of its own that is named {min(own)}"
    if kind is nn.Sequential and not fuses(module):
        return ""
    return None


def _kind(module: nn.Module) -> type[nn.Module] | None:
    kind = type(module)
    if kind in _FORMS:
        return kind
    return nn.Sequential if isinstance(module, nn.Sequential) and _only_adds(kind) else None


def _only_adds(kind: type[nn.Module]) -> bool:
    """Whether a class of Sequentials still runs its children one after the other."""
    same = ("forward", "__iter__", "__call__", "_call_impl", "__getattr__")
    return all(getattr(kind, name, None) is getattr(nn.Sequential, name, None) for name in same)


def fuses(module: nn.Module) -> bool:
    """Whether a Sequential has children that keep less as one node."""
    trial = _fused.FusedSequential(*module._modules.values())
    return any(trial.gains(piece) for piece in trial.pieces())


def form_of(module: nn.Module) -> type[nn.Module]:
    kind = _kind(module)
    assert kind is not None, "why_not said so"
    old: Any = type(module)
    lean: type[nn.Module] = _FORMS[kind].lean if kind is old else _fused.fused_kind(old)
    return lean


def keeps(module: nn.Module) -> str:
    """In words, what a lean module keeps for its backward."""
    if can_mask(module):
        return _MASK if module.saves == "mask" else _OUTPUT
    return next(form.keeps for form in _FORMS.values() if isinstance(module, form.lean))


_MASKED = (_activations.ReLU, _activations.ReLU6, _activations.LeakyReLU, _activations.Hardtanh)


def can_mask(module: nn.Module) -> bool:
    return isinstance(module, _MASKED)


def start(module: nn.Module, *, counted: bool) -> None:
    """What an activation keeps to begin with. Torch's ReLU keeps its output, too; the others keep their input, and what
    comes behind them may write over the output, which only a count of all that is kept can rule out."""
    if can_mask(module):
        module.saves = "output" if counted or isinstance(module, _activations.ReLU) else "mask"  # type: ignore[assignment]


def prefers_mask(module: nn.Module, *, alone: bool, shared: bool) -> bool:
    """Whether one bit is less than the output, or safer: see ``start``."""
    return can_mask(module) and (alone if isinstance(module, _activations.ReLU) else not shared)


def mask(module: nn.Module) -> None:
    module.saves = "mask"  # type: ignore[assignment]
