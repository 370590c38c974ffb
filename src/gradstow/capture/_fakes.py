"""A copy of the model on fake tensors: same structure, no memory."""

from __future__ import annotations

import contextlib
import copy
import random
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gradstow.capture._tree import map_tensors, tensors

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class Fakes:
    """Fake twins of the user's objects under one fake mode; the same tensor always gets the same twin."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._memo: dict[int, Any] = {}
        self._alive: list[Any] = []  # ids stay valid only while their objects live

    def tensor(self, real: torch.Tensor) -> torch.Tensor:
        if id(real) not in self._memo:
            twin: torch.Tensor = self.mode.from_tensor(real if real.grad_fn is None else real.detach())
            if isinstance(real, torch.nn.Parameter):
                twin = torch.nn.Parameter(twin, requires_grad=real.requires_grad)
            elif real.grad_fn is not None:  # made by code outside of the model, which the rehearsal ends at
                with self.mode, torch.enable_grad():
                    leaf = twin.requires_grad_()
                    twin = leaf.view_as(leaf)
            self._memo[id(real)] = twin
            self._alive.append(real)
        return self._memo[id(real)]

    def tree(self, item: Any) -> Any:
        """``item`` with every tensor in its containers replaced by its twin. Other objects are copied: the model may
        change them, as it appends to a cache of keys and values, and the rehearsal must not."""
        for real in tensors(item):
            self.tensor(real)
        return map_tensors(item, self.tensor, self._copied)

    def _copied(self, leaf: Any) -> Any:
        if isinstance(leaf, type | types.ModuleType | torch.nn.Module) or not hasattr(leaf, "__dict__"):
            return leaf
        try:
            return copy.deepcopy(leaf, self._memo)
        except Exception:  # a lock, a file: the model gets the object itself, as it does in a real step
            return leaf

    def model(self, model: torch.nn.Module) -> torch.nn.Module:
        """A copy without the user's hooks (torch's own, such as spectral_norm's, belong to the model)."""
        for module in model.modules():
            for owner in (module._parameters, module._buffers, vars(module)):
                for item in owner.values():
                    if isinstance(item, torch.Tensor):
                        self.tensor(item)
        grads = [(p, p.grad) for p in model.parameters() if p.grad is not None]
        try:
            for parameter, _ in grads:
                parameter.grad = None
            twin = copy.deepcopy(model, self._memo)
        finally:
            for parameter, grad in grads:
                parameter.grad = grad
        for module in twin.modules():
            for name in _HOOKS:
                hooks = getattr(module, name, {})
                for key in [k for k, hook in hooks.items() if not _is_torchs(hook)]:
                    del hooks[key]
        return twin

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """A copy that steps the fake parameters."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.tensor(parameter)
        for state in optimizer.state.values():
            for item in state.values():
                if isinstance(item, torch.Tensor) and (item.dim() or item.device.type != "cpu"):
                    self.tensor(item)
                elif isinstance(item, torch.Tensor):
                    self._counter(item)
        return copy.deepcopy(optimizer, self._memo)

    def _counter(self, real: torch.Tensor) -> None:
        """A number of steps: the optimizer reads it, and a fake has none unless it was made with one."""
        with self.mode:
            self._memo[id(real)] = torch.tensor(1, dtype=real.dtype)
        self._alive.append(real)


def _is_torchs(hook: Any) -> bool:
    return type(hook).__module__.startswith("torch.")


@contextlib.contextmanager
def same_randomness() -> Iterator[None]:
    """Leave the random streams of Python, NumPy and torch as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
