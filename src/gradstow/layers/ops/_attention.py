"""``attention``: torch's own kernel where it keeps no queries × keys tensor, chunks of queries elsewhere.

``gradstow::attention`` and its backward are operators, so that a compiler or a planner sees one op and no loop. Which
of the two ways is taken depends on what requires grad, which Dynamo cannot ask: ``gradstow::choose_attention`` decides
beneath it.

Dropout's seed is drawn outside of ``gradstow::attention``, which is therefore a function of its inputs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from gradstow._errors import GradstowError
from gradstow.layers.ops import _bits
from gradstow.layers.ops._again import differentiable_again
from gradstow.layers.ops._attention_chunks import (
    Options,
    attention_gradients,
    attention_in_chunks,
    default_chunk,
    empty_output,
)

Tensor = torch.Tensor

_COMMON = "Tensor query, Tensor key, Tensor value, Tensor? mask"
_OPTIONS = "float dropout, bool causal, float scale, int chunk"


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    chunk: int | None = None,
) -> Tensor:
    """``F.scaled_dot_product_attention`` whose backward never needs a queries × keys tensor.

    Shapes as there: query (..., H, L, E), key (..., H, S, E), value (..., H, S, V), ``attn_mask`` broadcastable to
    (..., H, L, S), boolean (True takes part) or added, in which case it may require grad; with ``is_causal`` as well,
    both hold. A row that is masked entirely gives zeros.

    torch's own kernel runs where nothing requires grad, and where it is one that keeps only query, key, value, its
    output and one statistic per row (see ``keeps_rows_only``). Everything else, and every call with a ``chunk``, is
    computed in chunks of ``chunk`` rows (one query of one head each): kept are query, key, value and the mask as they
    were given, and with dropout a seed of 8 bytes. Working memory beside the gradients: at most 3 × ``chunk`` × S
    numbers (half as much again while dropout or a mask is applied) and the keys and values of the heads in one chunk,
    twice; float32 for short floats, whose gradients are then summed in float32, too. By default ``chunk`` × S is 2¹⁸ on
    a CPU and 2²⁴ elsewhere.

    Dropout's numbers are another draw than torch's, of the same distribution: a chunked call takes one 64-bit number
    from the CPU's default generator, and nothing from the device's.

    Raises:
        GradstowError: ``chunk`` is less than 1, or shapes that cannot be cut into chunks.
    """
    if chunk is not None and chunk < 1:
        raise GradstowError(f"chunk={chunk} rows of attention. A chunk has one row at least; None chooses its size.")
    choose = torch.ops.gradstow.choose_attention.default
    result: Tensor = choose(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, chunk)
    return result


def keeps_rows_only(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, gqa: bool
) -> bool:
    """Whether torch's own call ends in a kernel that keeps one statistic per row, and copies no large mask.

    A boolean mask is turned into floats, and that copy is kept: a row of keys may pass, but not queries × keys. On a
    CPU this is the rule by which torch takes its flash kernel. It has an operator that answers, but not for fakes.
    """
    if mask is not None and mask.dtype == torch.bool and mask.dim() > 1 and mask.shape[-2] > 1:
        return False
    if query.device.type != "cpu":
        answer = torch._fused_sdp_choice(query, key, value, mask, dropout, causal, enable_gqa=gqa)
        return bool(answer != torch.nn.attention.SDPBackend.MATH.value)
    shapes = [x.shape if x.dim() != 3 else (1, *x.shape) for x in (query, key, value)]
    if dropout or not torch.backends.cuda.flash_sdp_enabled() or any(len(s) != 4 or 0 in s for s in shapes):
        return False
    heads, groups, others = (s[1] for s in shapes)
    if groups != others or (heads % groups if gqa else groups not in (1, heads)):
        return False
    alike = len({s[0] for s in shapes}) == 1 and len({s[3] for s in shapes}) == 1 and shapes[1][2] == shapes[2][2]
    if not alike or any(x.stride(-1) != 1 for x in (query, key, value)):
        return False
    return mask is None or (not mask.requires_grad and mask.dim() in (2, 4, query.dim()))


def _choose(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    gqa: bool,
    chunk: int | None,
) -> Tensor:
    given = [x for x in (query, key, value, mask) if x is not None]
    idle = not torch.is_grad_enabled() or not any(x.requires_grad for x in given)
    empty = not all(x.numel() for x in given) or any(x.is_nested for x in given)
    both = mask is not None and causal
    if empty or (
        chunk is None and not both and (idle or keeps_rows_only(query, key, value, mask, dropout, causal, gqa))
    ):
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale=scale, enable_gqa=gqa)
    query, key, value, mask = _autocast(query, key, value, mask)
    batch, (query, key, value, mask) = _four_dimensional(query, key, value, mask, gqa)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    rows = default_chunk(query, key, causal) if chunk is None else chunk
    seed = torch.randint(0, 1 << 62, (1,), device="cpu") if dropout else None
    result: Tensor = torch.ops.gradstow.attention.default(query, key, value, mask, seed, dropout, causal, scale, rows)
    return result.reshape(*batch, *result.shape[-2:])


def _autocast(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> list[Any]:
    """As autocast treats torch's own call: all in its type, but for float64."""
    device = query.device.type
    if not torch.is_autocast_enabled(device):
        return [query, key, value, mask]
    short = torch.get_autocast_dtype(device)
    both = (torch.float32, torch.float16, torch.bfloat16)
    return [x.to(short) if x is not None and x.dtype in both else x for x in (query, key, value, mask)]


def _four_dimensional(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, gqa: bool
) -> tuple[torch.Size, list[Any]]:
    """The result's leading sizes, and all inputs as (B, H, ·, ·), where each B and H may be 1."""
    inputs = [query, key, value]
    try:
        lead = [x.shape[:-2] for x in inputs]
        if gqa:
            groups = {lead[1][-1], lead[2][-1]}
            if len(groups) > 1 or lead[0][-1] % lead[1][-1]:
                raise RuntimeError("the heads of key and value must be as many, and divide those of the query")
            lead = [torch.Size((*s[:-1], lead[0][-1])) for s in lead]
        batch = torch.broadcast_shapes(*lead)
        if mask is not None:
            torch.broadcast_shapes(mask.shape, (*batch, query.shape[-2], key.shape[-2]))
            inputs.append(mask)
    except (RuntimeError, IndexError) as error:
        sizes = ", ".join(str(tuple(x.shape)) for x in inputs)
        raise GradstowError(f"attention over {sizes}: {error}. Make the leading sizes broadcastable.") from error
    found: list[Any] = [_flattened(x, batch) for x in inputs]
    return batch, found + [None] * (4 - len(found))


def _flattened(x: Tensor, batch: torch.Size) -> Tensor:
    x = x[(None,) * (4 - x.dim())] if x.dim() < 4 else x
    if len(batch) <= 2:
        return x
    if any(n > 1 for n in x.shape[:-3]):  # a view where that can be
        x = x.expand(*batch[:-1], *x.shape[-3:])
    return x.flatten(0, -4)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seed: Tensor | None, *options: Any
) -> Tensor:
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        return attention_in_chunks(query, key, value, mask, seed, Options(*options))


def _attention_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    mask, seed, *options, needed = rest
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        found = attention_gradients(gradient, query, key, value, mask, seed, Options(*options), needed)
    return tuple(found)


def _fake_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    inputs = (query, key, value, rest[0])
    return tuple(
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if need and x is not None else query.new_empty(0)
        for x, need in zip(inputs, rest[-1], strict=True)
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.options = inputs[5:]


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    query, key, value, mask, seed = ctx.saved_tensors
    needed = list(ctx.needs_input_grad[:4])
    found: tuple[Tensor | None, ...]
    if torch.is_grad_enabled():

        def again(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            with torch.autocast(query.device.type, enabled=False):
                return attention_in_chunks(query, key, value, mask, seed, Options(*ctx.options))

        found = differentiable_again(again, (query, key, value, mask), needed, gradient)
    else:
        backward = torch.ops.gradstow.attention_backward.default
        found = backward(gradient, query, key, value, mask, seed, *ctx.options, needed)
    return *(x if need else None for x, need in zip(found, needed, strict=True)), *[None] * (1 + len(ctx.options))


_bits.register(
    f"attention({_COMMON}, Tensor? seed, {_OPTIONS}) -> Tensor", _attention, lambda q, k, v, *_: empty_output(q, k, v)
)
_bits.register(
    f"attention_backward(Tensor gradient, {_COMMON}, Tensor? seed, {_OPTIONS}, bool[] needed) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _attention_backward,
    _fake_backward,
)
torch.library.register_autograd("gradstow::attention", _gradients, setup_context=_keep, lib=_bits.LIBRARY)
_bits.LIBRARY.define(
    f"choose_attention({_COMMON}, float dropout, bool causal, float? scale, bool gqa, int? chunk) -> Tensor"
)
_bits.LIBRARY.impl("choose_attention", _choose, "CompositeImplicitAutograd")
