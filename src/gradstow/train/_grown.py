"""Batches of any size that take no memory: fake tensors with the layout of an example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradstow._errors import CaptureError
from gradstow.capture import Fakes, first_line, same_randomness, tensors
from gradstow.train._window import check_dense, map_tensors, size_of

MakeBatch = Callable[[int], Any]


class Samples:
    """Makes batches of ``count`` samples, from an example batch or by a function, on fake tensors.

    An example is never copied. A function is called under a fake mode, where ``torch.randn(count, ...)`` takes no
    memory; one that cannot run there is called once, for two samples, and what it makes serves as the example.
    """

    def __init__(self, source: Any) -> None:
        self._mode = Fakes().mode
        self._make: MakeBatch | None = None if isinstance(source, torch.Tensor) or not callable(source) else source
        self._example = source if self._make is None else None

    def __call__(self, count: int) -> Any:
        if self._make is not None:
            made = self._made(self._make, count)
            if made is not None:
                return made
        return self._grown(count)

    def _made(self, make: MakeBatch, count: int) -> Any:
        """None where the function needs real tensors: then there is an example."""
        try:
            with same_randomness(), self._mode:
                batch = make(count)
                if tensors(batch):
                    return map_tensors(batch, self._fake)
            why = "it returned no tensor"
        except Exception as error:
            why = first_line(error)
        with same_randomness():
            self._make, self._example = None, make(2)
        if not tensors(self._example):
            raise CaptureError(
                f"make_batch({count}) cannot be used: {why}. It takes a number of samples and returns a batch of "
                "tensors."
            )
        return None

    def _grown(self, count: int) -> Any:
        have = size_of(self._example)
        check_dense(self._example)

        def grown(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() == 0 or len(tensor) != have:
                return self._fake(tensor)
            shape, strides = (count, *tensor.shape[1:]), tensor.stride()
            if tensor.is_contiguous() or strides[0] < max(strides):
                made = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            else:
                made = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
            return made.requires_grad_(tensor.requires_grad)

        with self._mode:
            return map_tensors(self._example, grown)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        fake: torch.Tensor = self._mode.from_tensor(tensor)
        return fake
