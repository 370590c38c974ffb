"""Hand a region's gradients to autograd while its backward goes on, as plain PyTorch does node by node.

A region is one node of autograd, and what a node returns arrives only when it is through. So the region's inputs
pass through a few more nodes on their way in. The region's node runs its code up to the first gradients and returns
stand-ins for the others; each further node runs the next part and returns real ones. Autograd adds them itself, so
hooks, tied weights, ``autograd.grad`` and whatever listens to parameters see what they always see.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

Given = list[tuple[int, torch.Tensor]]  # positions in the region's inputs, with their gradients
Steps = Generator[Given, None, tuple[Any, ...]]


class Handover:
    """The backwards of one forward call of a region. ``groups``: positions of gradients, in the order they leave."""

    def __init__(self, groups: Sequence[tuple[int, ...]]) -> None:
        self.groups = groups
        self._steps: Steps | None = None
        self._arrived = 0  # groups whose gradients were made
        self._ready: dict[int, torch.Tensor] = {}

    def attach(self, args: Sequence[Any]) -> list[Any]:
        """The arguments, those of the second group and later as outputs of a node of their own.

        Autograd runs what was made last first, and so the groups in their order.
        """
        passed = list(args)
        for index in reversed(range(1, len(self.groups))):
            positions = self.groups[index]
            for position, item in zip(positions, _Part.apply(self, index, *(args[p] for p in positions)), strict=True):
                passed[position] = item
        return passed

    def begin(self, steps: Steps, stand_ins: Callable[[int], Any], count: int) -> list[Any]:
        """Run up to the first gradients. What the region's node returns: these, and stand-ins for the others."""
        self._steps, self._arrived, self._ready = steps, 0, {}
        result: list[Any] = [None] * count
        for position, gradient in zip(self.groups[0], self.take(0), strict=True):
            result[position] = gradient
        for positions in self.groups[1:]:
            for position in positions:
                result[position] = stand_ins(position)
        return result

    def whole(self) -> None:
        """The region's node returns all gradients by itself this time."""
        self._steps = None

    @property
    def running(self) -> bool:
        return self._steps is not None

    def take(self, index: int) -> list[Any]:
        """The gradients of a group, for whose sake the backward goes on."""
        while self._arrived <= index:
            self._advance()
        return [self._ready.pop(position, None) for position in self.groups[index]]

    def _advance(self) -> None:
        assert self._steps is not None
        self._arrived += 1
        try:
            given = next(self._steps)
        except StopIteration as stop:
            self._ready.update((i, g) for i, g in enumerate(stop.value) if g is not None)
            return
        while given:  # emptied, so that nobody else holds them when autograd has them
            position, gradient = given.pop()
            self._ready[position] = gradient


class _Part(torch.autograd.Function):
    """Passes its inputs on; its backward is the part of the region's backward that ends with their gradients."""

    @staticmethod
    def forward(ctx: Any, handover: Handover, index: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.handover, ctx.index = handover, index
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        if not ctx.handover.running:
            return (None, None, *gradients)
        return (None, None, *ctx.handover.take(ctx.index))


class Current(threading.local):
    """Whose backward is about to run in this thread."""

    handover: Handover | None = None
