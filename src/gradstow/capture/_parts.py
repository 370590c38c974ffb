"""Parts of a model that are captured on their own, where PyTorch's tracer leaves out the code that calls them.

A graph break inside of a loop makes the tracer leave the whole function to Python. What it calls is traced again, but
not the layers that PyTorch itself wrote: these get a call of ours in their call slot, which is traced.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from gradstow.capture._backend import call_module


class _Part:
    """Sits in the call slot of a layer. Copies and pickles of it are empty, as for any plain layer."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None, "the slot dies with its module"
        return call_module(module, args, kwargs)

    def __deepcopy__(self, _memo: Any) -> None:
        """What gets a copy of the slot is a plain layer."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def expose_parts(model: nn.Module) -> bool:
    """Let the outermost layers that PyTorch wrote be captured on their own; whether any was not yet."""
    new = [m for m in _layers(model) if m._compiled_call_impl is None]
    for module in new:
        module._compiled_call_impl = _Part(module)
    return bool(new)


def hide_parts(model: nn.Module) -> None:
    """Undo ``expose_parts``."""
    for module in model.modules():
        if is_part(module):
            module._compiled_call_impl = None


def has_parts(model: nn.Module) -> bool:
    return any(is_part(m) for m in model.modules())


def is_part(module: nn.Module) -> bool:
    return isinstance(module._compiled_call_impl, _Part)


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    for child in model.children():
        ours = type(child).__module__.startswith(torch.nn.__name__ + ".")
        if ours and not isinstance(child, _CONTAINERS):
            yield child
        else:
            yield from _layers(child)
