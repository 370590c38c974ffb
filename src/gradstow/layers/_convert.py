"""Swap a model's modules for lean ones, in place, and say what that saves."""

from __future__ import annotations

import copy
import difflib
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gradstow._errors import PolicyError
from gradstow.layers import _lean
from gradstow.layers._conversion import Conversion, Swap
from gradstow.layers._savers import Saves, watch_saves

Chosen = str | type[nn.Module]


def convert(
    model: nn.Module,
    only: Chosen | Sequence[Chosen] | None = None,
    *,
    skip: Chosen | Sequence[Chosen] = (),
    batch: Any = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> Conversion:
    """Turn modules of a model into lean ones that keep less for the backward. In place: modules, parameters, hooks and
    ``state_dict`` stay what they are; each swapped module only gets another class.

    Only modules of exactly torch's own class are swapped (and Sequentials that do not define a forward): a class of
    your own, or a parametrized one, may do something else. ``print`` the result to see what was swapped, what was
    left and why, and what it saves; ``.undo()`` gives every module its class back. Convert before ``gs.stow``.

    Args:
        only: what to swap: torch's classes (``nn.ReLU``), their names (``"ReLU"``), or paths with wildcards
            (``"layer1.*"``); one or several. None swaps all whose lean form keeps less, or computes more precisely.
        skip: what to leave, in the same way.
        batch: what a loader yields, to count bytes with: a copy of the model runs forward on it before and after, in
            training mode and without touching the RNG. It also decides, per activation, whether one bit per element
            is less than the output: not where the next layer keeps that output anyway. Without it ReLU keeps its
            output, as torch does, and the others one bit.
        forward: how the model is called, as ``forward(model, batch)``; by default a mapping is given as keyword
            arguments, and of a pair only the first.

    Memory: the two forwards keep what a training forward keeps, one after the other.

    Raises:
        PolicyError: something in ``only`` or ``skip`` fits no module; the model is left as it was.
    """
    chosen, left = _choose(model, _listed(only), _listed(skip))
    call = forward or _call
    before = None if batch is None else _saves_of(model, batch, call)
    swaps = []
    for path, module in chosen.items():
        old = type(module)
        module.__class__ = _lean.form_of(module)
        _lean.start(module, counted=batch is not None)
        swaps.append(Swap(path, module, old, type(module), _lean.keeps(module)))
    conversion = Conversion(tuple(swaps), left)
    if batch is not None:
        assert before is not None
        try:
            after = _masks_where_less(model, batch, call, conversion)
        except BaseException:
            conversion.undo()
            raise
        conversion.count(before, after)
    return conversion


def _listed(chosen: Chosen | Sequence[Chosen] | None) -> tuple[Chosen, ...] | None:
    return chosen if chosen is None else (chosen,) if isinstance(chosen, (str, type)) else tuple(chosen)


def _choose(
    model: nn.Module, only: tuple[Chosen, ...] | None, skip: tuple[Chosen, ...] | None
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """What is swapped, and why the rest of what was meant is not."""
    modules = dict(model.named_modules())
    for one in (*(only or ()), *(skip or ())):
        if not any(_fits(one, path, module) for path, module in modules.items()):
            raise PolicyError(_unknown(one, modules))
    chosen, left = {}, {}
    for path, module in modules.items():
        if any(_fits(one, path, module) for one in skip or ()):
            continue
        if only is not None and not any(_fits(one, path, module) for one in only):
            continue
        reason = _lean.why_not(module, asked=only is not None)
        if reason is None:
            chosen[path] = module
        elif reason:
            left[path] = reason
    return chosen, left


def _fits(one: Chosen, path: str, module: nn.Module) -> bool:
    if isinstance(one, type):
        return isinstance(module, one)
    names = (kind.__name__ for kind in type(module).__mro__ if issubclass(kind, nn.Module))
    return fnmatch.fnmatchcase(path, one) or one in names


def _unknown(one: Chosen, modules: Mapping[str, nn.Module]) -> str:
    if isinstance(one, type):
        return f"the model has no {one.__name__}, so nothing was converted. Leave it out, or name another type or path."
    known = [*modules, *{type(m).__name__ for m in modules.values()}]
    close = difflib.get_close_matches(one, known, n=3)
    hint = f"Did you mean {' or '.join(repr(c) for c in close)}?" if close else "See model.named_modules()."
    return f"{one!r} is no module's path or type in this model, so nothing was converted. {hint}"


def _call(model: nn.Module, batch: Any) -> Any:
    """As ``gs.plan`` calls it."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, (tuple, list)) and len(batch) == 2 else batch)


def _saves_of(model: nn.Module, batch: Any, call: Callable[[nn.Module, Any], Any]) -> Saves:
    """Of a copy, so that statistics and counters of the model stay; and of another stream of random numbers."""
    twin = copy.deepcopy(model).train()
    devices = {t.device for t in (*twin.parameters(), *twin.buffers()) if t.device.type == "cuda"}
    with torch.random.fork_rng(devices=[d.index for d in devices]), torch.enable_grad():
        return watch_saves(twin, lambda: call(twin, batch), _tensors(batch))


def _tensors(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    inside = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    return [tensor for part in inside for tensor in _tensors(part)]


def _masks_where_less(
    model: nn.Module, batch: Any, call: Callable[[nn.Module, Any], Any], conversion: Conversion
) -> Saves:
    """Let activations keep one bit per element where nobody else keeps their output."""
    found = _saves_of(model, batch, call)
    masked = [
        s
        for s in conversion.swaps
        if _lean.prefers_mask(s.module, alone=found.alone(s.path), shared=found.shared(s.path))
    ]
    for swap in masked:
        _lean.mask(swap.module)
    return _saves_of(model, batch, call) if masked else found
