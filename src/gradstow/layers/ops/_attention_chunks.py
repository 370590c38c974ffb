"""Attention in chunks, and its gradients: no batch × heads × queries × keys tensor is kept, or made.

A chunk is some heads with all of their queries, or some queries of one head. It sees all keys, so a row of scores is
always whole and its softmax is torch's own, in the forward and again in the backward. The query, key and value are
then all that is kept: one statistic per row less than with an online softmax, and the output is not needed either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

Tensor = torch.Tensor


class Options(NamedTuple):
    """What does not change from chunk to chunk. ``chunk`` counts rows: one query of one head each."""

    dropout: float
    causal: bool
    scale: float
    chunk: int


class _Block(NamedTuple):
    """Some heads of some samples, as half-open ranges, and the heads of key and value that they read."""

    samples: slice
    heads: slice
    shared: slice


def attention_in_chunks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seed: Tensor | None, options: Options
) -> Tensor:
    """``query`` (B, H, L, E), ``key`` (B, G, S, E), ``value`` (B, G, S, V) with G dividing H, ``mask`` (B, H, L, S),
    boolean or added, gives (B, H, L, V). Any B, H and G, and all sizes of the mask, may be 1 instead. Differentiable as
    often as its ops are."""
    output = empty_output(query, key, value)
    drawn = _generator(seed, query)
    for block in _blocks(query, key, value, options.chunk):
        keys, values = (_exact(_part(x, block.samples, block.shared)) for x in (key, value))
        keys = keys * abs(options.scale) ** 0.5
        for rows in _rows(query, options.chunk):
            queries = _scaled(query, block, rows, options)
            weights = _weights(queries, keys, mask, block, rows, options)
            seen = weights.shape[-1]
            factor = _kept(weights, drawn, options)
            result = (weights if factor is None else weights * factor) @ values[:, :, :seen]
            output[block.samples, block.heads, rows] = result.to(output.dtype)
    return output


def attention_gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    options: Options,
    needed: tuple[bool, bool, bool, bool],
) -> list[Tensor]:
    """The gradients of query, key, value and mask, empty ones for those that are not ``needed``."""
    inputs = (query, key, value, mask)
    sums = [_sum_of(x) if need and x is not None else None for x, need in zip(inputs, needed, strict=True)]
    of_query, of_key, of_value, of_mask = sums
    root = abs(options.scale) ** 0.5
    drawn = _generator(seed, query)
    for block in _blocks(query, key, value, options.chunk):
        samples, heads, shared = block
        keys, values = (_exact(_part(x, samples, shared)) for x in (key, value))
        keys = keys * root
        for rows in _rows(query, options.chunk):
            queries = _scaled(query, block, rows, options)
            weights = _weights(queries, keys, mask, block, rows, options)
            seen = slice(weights.shape[-1])
            factor = _kept(weights, drawn, options)
            along = _exact(gradient[samples, heads, rows])
            if of_value is not None:
                dropped = weights if factor is None else weights * factor
                _add(_part(of_value, samples, shared, seen), dropped.transpose(-2, -1) @ along)
                del dropped
            if of_query is None and of_key is None and of_mask is None:
                continue
            step = along @ values[:, :, seen].transpose(-2, -1)
            if factor is not None:
                step.mul_(factor)
            step = torch.ops.aten._softmax_backward_data(step, weights, -1, weights.dtype)
            del weights, factor
            if of_mask is not None:
                _add(_part(of_mask, samples, heads, rows, seen), step)
            if of_query is not None:
                _add(_part(of_query, samples, heads, rows), (step @ keys[:, :, seen]).mul_(_signed(options.scale)))
            if of_key is not None:
                # transposed as in torch's composite: some processors' products sum otherwise the other way round
                across = (queries.transpose(-2, -1) @ step).mul_(root)
                _add(_part(of_key, samples, shared, seen), across.transpose(-2, -1))
            del step
    made = [query.new_empty(0) if s is None else s for s in sums]
    return [m.to(query.dtype if x is None else x.dtype) for m, x in zip(made, inputs, strict=True)]


def empty_output(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """(B, H, L, V) in the memory layout (B, L, H, V), in which the heads are put side by side for free."""
    samples, heads = _sizes(query, key, value)
    return query.new_empty((samples, query.shape[2], heads, value.shape[3])).transpose(1, 2)


def default_chunk(query: Tensor, key: Tensor, causal: bool) -> int:
    """Rows with scores of 1 MiB of float32 on a CPU, where a cache holds them, else 64 MiB. Long causal attention
    goes in four chunks per head at least, for what lies behind a chunk's last query is left out."""
    rows = max(16, (1 << (18 if query.device.type == "cpu" else 24)) // max(1, key.shape[2]))
    return min(rows, -(-query.shape[2] // 4)) if causal and query.shape[2] >= 512 else rows


def _sizes(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, int]:
    """Samples and heads of the result."""
    samples, heads = (max(x.shape[dim] for x in (query, key, value)) for dim in (0, 1))
    return samples, heads


def _blocks(query: Tensor, key: Tensor, value: Tensor, chunk: int) -> Iterator[_Block]:
    """Whole heads, as many as a chunk holds, all of which share the key's heads in the same way."""
    samples, heads = _sizes(query, key, value)
    group = heads // max(key.shape[1], value.shape[1])  # heads of the query that share one of the key
    fit = max(1, chunk // query.shape[2])
    together = max(1, fit // heads) if group in (1, heads) else 1
    span = heads if group == 1 else group
    for b in range(0, samples, together):
        for first in range(0, heads, span):
            for h in range(first, first + span, min(fit, span)):
                end = min(h + fit, first + span)
                shared = slice(h, end) if group == 1 else slice(h // group, h // group + 1)
                yield _Block(slice(b, b + together), slice(h, end), shared)


def _rows(query: Tensor, chunk: int) -> Iterator[slice]:
    queries = query.shape[2]
    return (slice(i, min(i + chunk, queries)) for i in range(0, queries, chunk))


def _exact(x: Tensor) -> Tensor:
    """Short floats are computed in float32, as in torch's own composite."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _signed(scale: float) -> float:
    """The query's share of the scale; the key's is its root, as in torch: against overflow."""
    return math.copysign(abs(scale) ** 0.5, scale)


def _scaled(query: Tensor, block: _Block, rows: slice, options: Options) -> Tensor:
    return _exact(_part(query, block.samples, block.heads, rows)) * _signed(options.scale)


def _weights(
    queries: Tensor, keys: Tensor, mask: Tensor | None, block: _Block, rows: slice, options: Options
) -> Tensor:
    """The softmax of one chunk's scores; under ``causal`` without the keys that none of its queries sees."""
    whole = -(-rows.stop // 64) * 64  # up to here, so that sums over keys are cut as they are without a cut
    seen = min(whole, keys.shape[2]) if options.causal else keys.shape[2]
    scores = queries @ keys[:, :, :seen].transpose(-2, -1)
    if mask is not None:
        part = _part(mask, block.samples, block.heads, rows, slice(seen))
        scores = torch.where(part, scores, float("-inf")) if part.dtype == torch.bool else scores + part
    if options.causal and seen > rows.start + 1:
        ahead = torch.ones((scores.shape[-2], seen - rows.start), dtype=torch.bool, device=scores.device).triu_(1)
        scores[..., rows.start :].masked_fill_(ahead, float("-inf"))
    if mask is None:
        return torch.softmax(scores, -1)
    return torch._safe_softmax(scores, -1) if torch.is_grad_enabled() else _softmax_or_zero(scores)


def _softmax_or_zero(scores: Tensor) -> Tensor:
    """``torch._safe_softmax``, without its three passes where no row is masked entirely."""
    dead = scores.amax(-1, keepdim=True) == float("-inf")
    weights = torch.softmax(scores, -1)
    if scores.device.type != "cpu" or dead.any():  # asking a GPU would wait for it
        weights.masked_fill_(dead, 0.0)
    return weights


def _part(x: Tensor, *wanted: slice) -> Tensor:
    """A view; what ``x`` has one of is taken whole."""
    return x[tuple(slice(None) if n == 1 else s for n, s in zip(x.shape, wanted, strict=False))]


def _generator(seed: Tensor | None, like: Tensor) -> torch.Generator | None:
    return None if seed is None else torch.Generator(like.device).manual_seed(int(seed))


def _kept(weights: Tensor, drawn: torch.Generator | None, options: Options) -> Tensor | None:
    """What dropout multiplies the weights with: 0, or 1 / (1 - p)."""
    if drawn is None:
        return None
    keep = 1 - options.dropout
    kept = torch.empty(weights.shape, dtype=torch.bool, device=weights.device).bernoulli_(keep, generator=drawn)
    return kept.to(weights.dtype).mul_(1 / keep if keep else 0.0)


def _sum_of(x: Tensor) -> Tensor:
    """Zeros to add an input's gradient to: in float32 for short floats, however many chunks there are."""
    return torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def _add(total: Tensor, part: Tensor) -> None:
    """Sums over what ``total`` has only one of."""
    total.add_(part.sum_to_size(total.shape))
