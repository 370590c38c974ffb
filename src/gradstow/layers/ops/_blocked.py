"""A large matrix product as many products of blocks, issued side by side: on CUDA streams, or on threads.

The blocks cut the result's rows and columns. Each sums over the whole inner size and writes into the result, so that
nothing is kept or added up besides, and a result has the rounding of one product.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.nn import functional as F

from gradstow._errors import GradstowError
from gradstow.layers.ops import _bits

Tensor = torch.Tensor
STREAMS = 4
BLOCK = 1024


def blocked_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, block: int = BLOCK) -> Tensor:
    """``F.linear``, with its product and those of its gradients cut into blocks of ``block`` × ``block`` results.

    ``input`` (..., I), ``weight`` (O, I), ``bias`` (O,) give (..., O). Kept: the input and the weight, as they are.
    Each block is a product of its own over the whole inner size; the error is that of one product. No memory is needed
    besides the results. What fits one block, and what nobody differentiates, is left to ``F.linear``.

    On CUDA the blocks run on four streams, which start after the current one and are joined before this returns. On a
    CPU they run on as many threads as there are cores for each of torch's own threads, one with torch's defaults
    (``torch.set_num_threads`` gives it fewer), for each block also uses those. Double backward works.

    Raises:
        GradstowError: ``block`` is less than 1.
    """
    if block < 1:
        raise GradstowError(f"block={block} rows and columns. A block has one at least; {BLOCK} is the default.")
    given = [x for x in (input, weight, bias) if x is not None]
    rows = input.numel() // max(1, input.shape[-1]) if input.dim() else 0
    idle = not torch.is_grad_enabled() or not any(x.requires_grad for x in given)
    alone = max(rows, *weight.shape) <= block
    if idle or alone or not all(x.numel() for x in given) or input.dim() < 1 or weight.dim() != 2:
        return F.linear(input, weight, bias)
    if torch.is_autocast_enabled(input.device.type):
        short = torch.get_autocast_dtype(input.device.type)
        input, weight = (x if x.dtype == torch.float64 else x.to(short) for x in (input, weight))
        bias = bias if bias is None or bias.dtype == torch.float64 else bias.to(short)
    flat = input.flatten(0, -2) if input.dim() > 1 else input[None]
    result = torch.ops.gradstow.blocked_product.default(flat, weight.t(), bias, block)
    return result.reshape(*input.shape[:-1], weight.shape[0])


def relu_sparse_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` that leaves out the columns of ``input`` that are zero throughout, as behind a ReLU.

    Shapes as ``blocked_linear``. Output and weight gradient are sums over the other columns only, equal but for the
    order of what is added (zero times a finite weight is left out; a NaN or inf in such a column of the weight is not
    seen); the input's gradient is whole, for a column of zeros has one. Kept: input and weight, and the indices.

    Pays where many columns are zero in *every* row: dead units, or a handful of rows, as when one token is decoded
    at a time (half of all columns for one row of random signs, 1/2ⁿ of them for n rows). It reads the weight's other
    columns as a copy, and asks the data, so that a compiler or a planner breaks its graph here.
    """
    result: Tensor = _SparseColumns.apply(input, weight, bias)
    return result


class _SparseColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        flat = input.reshape(-1, input.shape[-1])
        columns = flat.ne(0).any(0).nonzero().flatten()
        ctx.save_for_backward(input, weight, columns)
        return F.linear(flat[:, columns], weight[:, columns], bias).reshape(*input.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        input, weight, columns = ctx.saved_tensors
        of_input = gradient @ weight if ctx.needs_input_grad[0] else None
        flat = gradient.reshape(-1, gradient.shape[-1])
        of_weight = None
        if ctx.needs_input_grad[1] and torch.is_grad_enabled():  # whose own gradient is whole, too
            of_weight = flat.t() @ input.reshape(-1, input.shape[-1])
        elif ctx.needs_input_grad[1]:
            part = flat.t() @ input.reshape(-1, input.shape[-1])[:, columns]
            of_weight = weight.new_zeros(weight.shape).index_copy(1, columns, part)
        return of_input, of_weight, flat.sum(0) if ctx.needs_input_grad[2] else None


def _product(left: Tensor, right: Tensor, bias: Tensor | None, block: int) -> Tensor:
    result = left.new_empty((left.shape[0], right.shape[1]))
    tasks = [
        functools.partial(_one_block, left, right, bias, result, slice(i, i + block), slice(j, j + block))
        for i in range(0, result.shape[0], block)
        for j in range(0, result.shape[1], block)
    ]
    if result.device.type == "cuda":
        _on_streams(tasks, result.device)
    else:
        _on_threads(tasks)
    return result


def _one_block(left: Tensor, right: Tensor, bias: Tensor | None, result: Tensor, rows: slice, columns: slice) -> None:
    with torch.inference_mode(), torch.autocast(left.device.type, enabled=False):  # both belong to a thread
        into = result[rows, columns]
        if bias is None:
            torch.mm(left[rows], right[:, columns], out=into)
        else:
            torch.addmm(bias[columns], left[rows], right[:, columns], out=into)


def _on_threads(tasks: Sequence[Callable[[], None]]) -> None:
    workers = min(len(tasks), (os.cpu_count() or 1) // torch.get_num_threads())
    if workers <= 1:
        for task in tasks:
            task()
        return
    for done in [_pool(workers).submit(task) for task in tasks]:
        done.result()


@functools.cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="gradstow blocks")


def _on_streams(tasks: Sequence[Callable[[], None]], device: torch.device) -> None:
    """All memory belongs to the current stream, which waits for the others before it goes on: what is freed later
    cannot be used again too early, and ``record_stream``, which would hold it back, is not needed."""
    current, streams = torch.cuda.current_stream(device), _streams(device)[: len(tasks)]
    for stream in streams:
        stream.wait_stream(current)
    try:
        for i, task in enumerate(tasks):
            with torch.cuda.stream(streams[i % len(streams)]):
                task()
    finally:
        for stream in streams:
            current.wait_stream(stream)


@functools.cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(STREAMS)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    left, right, _, ctx.block = inputs
    needed = ctx.needs_input_grad
    ctx.save_for_backward(left if needed[1] else None, right if needed[0] else None)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    left, right = ctx.saved_tensors
    product, needed = torch.ops.gradstow.blocked_product.default, ctx.needs_input_grad
    of_left = product(gradient, right.t(), None, ctx.block) if needed[0] else None
    # (O, I) as the weight is, turned round: its gradient needs no copy then
    of_right = product(gradient.t(), left, None, ctx.block).t() if needed[1] else None
    return of_left, of_right, gradient.sum(0) if needed[2] else None, None


_bits.register(
    "blocked_product(Tensor left, Tensor right, Tensor? bias, int block) -> Tensor",
    _product,
    lambda x, y, *_: x.new_empty((x.shape[0], y.shape[1])),
)
torch.library.register_autograd("gradstow::blocked_product", _gradients, setup_context=_keep, lib=_bits.LIBRARY)
