"""The operators of the linear cross entropy, chunk by chunk over tokens: the logits of all tokens never exist at once.

For a token with logits ``l``, target ``t``, class weights ``w`` (1 where none are given), C classes, label smoothing
``e`` and z-loss ``z``, with ``lse = log(sum(exp(l)))``::

    loss = (1 - e) w[t] (lse - l[t])  +  e / C sum_c w[c] (lse - l[c])  +  z lse²

Its gradient is ``a softmax(l) - (1 - e) w[t] onehot(t) - e / C w`` with ``a = (1 - e) w[t] + e / C sum(w) + 2 z lse``.
Both are made in float32 (float64 for float64), a few rows at a time, which the cache holds; the products are taken in
the input's type. Loops are inside registered operators, so that compilers see one op.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gradstow._errors import GradstowError
from gradstow.layers.ops import _bits
from gradstow.layers.ops import triton as kernels

Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class TargetError(GradstowError, IndexError, ValueError):
    """A target that is not a class."""


_CHUNK_BYTES = {"cpu": 96 << 20}  # of logits; more where starting an op costs more
_BLOCK_ELEMENTS = 1 << 21  # of float32 logits that are worked on at once: they stay in the cache
_SLAB = 8192  # classes whose weight gradient is added up at once where the product's type is short

_OPTIONS = "Tensor? class_weight, int ignore_index, float smoothing, float z, int chunk, ScalarType dtype"


def statistics_type(dtype: torch.dtype) -> torch.dtype:
    """The type that losses, logsumexps and sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def default_chunk(classes: int, dtype: torch.dtype, device: torch.device) -> int:
    """Tokens at once: their logits take 96 MiB on CPU, 256 MiB elsewhere; at least one token."""
    room = _CHUNK_BYTES.get(device.type, 256 << 20) // max(classes * dtype.itemsize, 1)
    return max(room // 64 * 64 if room >= 64 else room, 1)


class Head:
    """What all chunks share: the weights in the type of the products, the terms of the loss per token."""

    def __init__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        class_weight: torch.Tensor | None,
        ignore_index: int,
        smoothing: float,
        z: float,
        chunk: int,
        dtype: torch.dtype,
    ) -> None:
        self.classes, self.width = weight.shape
        self.dtype, self.float = dtype, statistics_type(dtype)
        self.x = x.reshape(-1, self.width)
        self.weight = weight.to(dtype)
        self.bias = None if bias is None else bias.to(dtype)
        self.smoothing, self.z = smoothing, z
        self.chunk = chunk or default_chunk(self.classes, dtype, x.device)
        target = target.reshape(-1).long()
        self.valid = target.ne(ignore_index)
        _check_range(target, self.valid, self.classes, ignore_index)
        self.target = target.masked_fill(~self.valid, 0)
        self.class_weight = None if class_weight is None else class_weight.to(self.float)
        hit = self.valid.to(self.float)
        self.hit = (1 - smoothing) * (hit if self.class_weight is None else hit * self.class_weight[self.target])
        whole = 1.0 if self.class_weight is None else self.class_weight.mean()
        self.even = self.valid.to(self.float) * (smoothing * whole)

    def chunks(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Tokens, their inputs, and their logits, in one buffer for all."""
        tokens = self.x.shape[0]
        buffer = self.weight.new_empty((min(self.chunk, tokens), self.classes))
        for start in range(0, tokens, self.chunk):
            part = slice(start, min(start + self.chunk, tokens))
            x = self.x[part].to(self.dtype)
            logits = buffer[: x.shape[0]]
            if self.bias is None:
                torch.mm(x, self.weight.t(), out=logits)
            else:
                torch.addmm(self.bias, x, self.weight.t(), out=logits)
            yield part, x, logits

    def blocks(self, part: slice) -> Iterator[tuple[slice, slice]]:
        """Rows of a chunk that are worked on at once: among all tokens, and within the chunk."""
        size = part.stop - part.start
        if self.weight.device.type == "cpu":
            size = max(_BLOCK_ELEMENTS // max(self.classes, 1), 1)
        for start in range(part.start, part.stop, size):
            stop = min(start + size, part.stop)
            yield slice(start, stop), slice(start - part.start, stop - part.start)

    def losses(self, rows: slice, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Losses, logsumexps, and the sums of the exponentials, which replace the logits in ``block``."""
        highest = block.amax(1)
        block.sub_(highest.unsqueeze(1))
        taken = block.gather(1, self.target[rows].unsqueeze(1)).squeeze(1).mul_(self.hit[rows])
        if self.smoothing:
            even = block.mean(1) if self.class_weight is None else block.mv(self.class_weight).div_(self.classes)
            taken.add_(even, alpha=self.smoothing)
        total = block.exp_().sum(1)
        log = total.log()
        loss = (self.hit[rows] + self.even[rows]).mul_(log).sub_(taken)
        lse = log.add_(highest)
        if self.z:
            loss.addcmul_(lse, lse, value=self.z)
        return loss.masked_fill_(~self.valid[rows], 0.0), lse, total

    def to_gradient(
        self, rows: slice, exponentials: torch.Tensor, total: Any, lse: torch.Tensor, factor: torch.Tensor
    ) -> None:
        """Turn ``exponentials``, whose sums are ``total``, into the gradient of the logits, in place."""
        factor = factor[rows]
        scale = self.hit[rows] + self.even[rows]
        if self.z:
            scale = scale + 2 * self.z * lse
        exponentials.mul_((scale * factor / total).unsqueeze(1))
        if self.smoothing:
            each = self.smoothing / self.classes * factor.unsqueeze(1)
            if self.class_weight is None:
                exponentials.sub_(each)
            else:
                exponentials.addcmul_(each, self.class_weight, value=-1)
        index = self.target[rows].unsqueeze(1)
        taken = exponentials.gather(1, index).sub_((self.hit[rows] * factor).unsqueeze(1))
        exponentials.scatter_(1, index, taken)


class Sums:
    """The gradients, added up over chunks in float32 (float64 for float64)."""

    def __init__(self, head: Head, needed: list[bool]) -> None:
        self.head = head
        make, empty = head.weight.new_zeros, head.weight.new_empty
        self.x = empty(head.x.shape if needed[0] else (0,), dtype=head.x.dtype)
        self.weight = make(head.weight.shape if needed[1] else (0,), dtype=head.float)
        self.bias = make((head.classes,) if needed[2] else (0,), dtype=head.float)
        self.needed = needed

    def add_rows(self, gradient: torch.Tensor) -> None:
        if self.needed[2]:
            self.bias += gradient.sum(0, dtype=self.bias.dtype)

    def add_chunk(self, part: slice, x: torch.Tensor, gradient: torch.Tensor) -> None:
        if self.needed[0]:
            if self.x.dtype == gradient.dtype:
                torch.mm(gradient, self.head.weight, out=self.x[part])
            else:
                self.x[part] = torch.mm(gradient, self.head.weight)
        if not self.needed[1]:
            return
        if gradient.dtype == self.weight.dtype:
            self.weight.addmm_(gradient.t(), x)
            return
        for start in range(0, self.head.classes, _SLAB):
            slab = slice(start, start + _SLAB)
            if x.device.type == "cuda":  # only there a product's result can be of a longer type than its factors
                self.weight[slab] += torch.mm(gradient[:, slab].t(), x, out_dtype=self.weight.dtype)
            else:
                self.weight[slab] += torch.mm(gradient[:, slab].t(), x)

    def results(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Grads:
        """In the types and shapes of what was given; empty where nobody needs them."""
        if self.needed[0]:
            self.x = self.x.view(x.shape)
        return self.x, self.weight.to(weight.dtype), self.bias.to(weight.dtype if bias is None else bias.dtype)


def _check_range(target: torch.Tensor, valid: torch.Tensor, classes: int, ignore_index: int) -> None:
    if target.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return  # a graph that is being captured cannot wait for an answer
    wrong = valid & (target.lt(0) | target.ge(classes))
    if bool(wrong.any()):
        found = int(target[wrong][0])
        raise TargetError(
            f"the target {found} is not a class: there are {classes}, from 0 on, and ignore_index is {ignore_index}. "
            "Give targets in that range, or mark tokens that have none by ignore_index."
        )


def _forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    head = Head(x, weight, bias, target, *options)
    if kernels.wanted("cross_entropy", x):
        return kernels.cross_entropy_forward(head)
    losses, lse = (x.new_empty(head.x.shape[:1], dtype=head.float) for _ in range(2))
    for part, _, logits in head.chunks():
        for rows, inside in head.blocks(part):
            losses[rows], lse[rows], _ = head.losses(rows, logits[inside].to(head.float))
    return losses, lse


def _backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    lse: torch.Tensor,
    factor: torch.Tensor,
    *options: Any,
) -> Grads:
    head = Head(x, weight, bias, target, *options[:-1])
    sums = Sums(head, options[-1])
    if kernels.wanted("cross_entropy", x):
        kernels.cross_entropy_backward(head, sums, lse, factor)
        return sums.results(x, weight, bias)
    for part, inputs, logits in head.chunks():
        for rows, inside in head.blocks(part):
            block = logits[inside].to(head.float)
            block.sub_(lse[rows].unsqueeze(1)).exp_()
            head.to_gradient(rows, block, 1.0, lse[rows], factor)
            sums.add_rows(block)
            _put(logits[inside], block)
        sums.add_chunk(part, inputs, logits)
    return sums.results(x, weight, bias)


def _both(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    factor: torch.Tensor,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    head = Head(x, weight, bias, target, *options[:-1])
    sums = Sums(head, options[-1])
    if kernels.wanted("cross_entropy", x):
        losses, lse = kernels.cross_entropy_forward(head)
        kernels.cross_entropy_backward(head, sums, lse, factor)
        return losses, *sums.results(x, weight, bias)
    losses = x.new_empty(head.x.shape[:1], dtype=head.float)
    for part, inputs, logits in head.chunks():
        for rows, inside in head.blocks(part):
            block = logits[inside].to(head.float)
            losses[rows], lse, total = head.losses(rows, block)
            head.to_gradient(rows, block, total, lse, factor)
            sums.add_rows(block)
            _put(logits[inside], block)
        sums.add_chunk(part, inputs, logits)
    return losses, *sums.results(x, weight, bias)


def _put(logits: torch.Tensor, block: torch.Tensor) -> None:
    if logits.dtype != block.dtype:  # else the block was worked on in place
        logits.copy_(block)


def _fake_forward(x: torch.Tensor, weight: torch.Tensor, bias: Any, target: torch.Tensor, *options: Any) -> Any:
    per_token = x.new_empty(target.numel(), dtype=statistics_type(options[-1]))
    return per_token, torch.empty_like(per_token)


def _fake_gradients(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, needed: list[bool]) -> Grads:
    classes = weight.shape[:1]
    return (
        x.new_empty(x.shape if needed[0] else (0,)),
        weight.new_empty(weight.shape if needed[1] else (0,)),
        (weight if bias is None else bias).new_empty(classes if needed[2] else (0,)),
    )


def _fake_backward(x: torch.Tensor, weight: torch.Tensor, bias: Any, *options: Any) -> Any:
    return _fake_gradients(x, weight, bias, options[-1])


def _fake_both(x: torch.Tensor, weight: torch.Tensor, bias: Any, target: torch.Tensor, *options: Any) -> Any:
    losses = x.new_empty(target.numel(), dtype=statistics_type(options[-2]))
    return losses, *_fake_gradients(x, weight, bias, options[-1])


chunked_losses = _bits.register(
    f"linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor target, {_OPTIONS}) -> (Tensor, Tensor)",
    _forward,
    _fake_forward,
)
chunked_gradients = _bits.register(
    "linear_cross_entropy_backward(Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor lse, Tensor factor, "
    f"{_OPTIONS}, bool[] needed) -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
losses_and_gradients = _bits.register(
    "linear_cross_entropy_both(Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor factor, "
    f"{_OPTIONS}, bool[] needed) -> (Tensor, Tensor, Tensor, Tensor)",
    _both,
    _fake_both,
)
