"""A linear head and its cross entropy as one node, which never holds the logits of all tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from gradstow._errors import GradstowError, PolicyError
from gradstow.layers.ops import _bits
from gradstow.layers.ops import _conditions as conditions
from gradstow.layers.ops import _cross_entropy_chunks as chunks
from gradstow.layers.ops._again import differentiable_again

_REDUCTIONS = ("mean", "sum", "none")
_TIMES = (None, "backward", "forward")


class DoubleBackwardError(GradstowError, RuntimeError):
    """A gradient that cannot be differentiated again."""


class Settings(NamedTuple):
    """All that is not a tensor; ``dtype`` is that of the products, ``result`` that of the loss."""

    reduction: str
    ignore_index: int
    smoothing: float
    z: float
    chunk: int
    dtype: torch.dtype
    result: torch.dtype


def linear_cross_entropy(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    class_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weights: torch.Tensor | None = None,
    reduction: str = "mean",
    chunk: int | None = None,
    when: str | None = None,
) -> torch.Tensor:
    """``cross_entropy(linear(input, weight, bias), target)`` without the logits of all tokens in memory.

    Shapes: ``input`` (..., in), ``weight`` (classes, in), ``bias`` and ``class_weight`` (classes), ``target`` and
    ``token_weights`` (...). The loss is a scalar, or (...) with ``reduction="none"``; its type is what plain PyTorch's
    is: the input's, or float32 under autocast.

    ``z_loss`` adds ``z_loss * logsumexp(logits)²`` to a token's loss. ``token_weights`` multiply it; "mean" divides by
    the sum of token weight times class weight of the target, over tokens that are not ignored. A mean over none is NaN
    as in plain PyTorch, with gradients of zero.

    Kept for the backward, with N tokens and C classes, ``when="backward"``: references to what was given, and a
    logsumexp per token: 4 N bytes (8 N for float64); the backward makes the logits again, a fourth matrix product.
    ``when="forward"``: the gradients that are needed, made beside the loss and each of its parameter's size and type,
    instead of what was given. This is faster, and wasted where nobody calls ``backward``; only for a loss that is one
    number. ``None`` takes "forward" where it can and where the input's type has float32's range.

    Working memory: the logits of ``chunk`` tokens (``None``: 96 MiB of them on CPU, 256 MiB elsewhere), and the
    weight's gradient in float32. Losses, logsumexps and sums over chunks are float32, float64 for float64.

    Raises:
        TargetError: for a target that is neither a class nor ``ignore_index``.
        PolicyError: for options that do not exist or do not go together, class probabilities as target among them.
        DoubleBackwardError: when a gradient made in the forward is to be differentiated again.
    """
    _check(input, weight, target, class_weight, token_weights)
    target = target.long()  # in uint8, ignore_index would be the number of a class
    cast = conditions.compute_dtype(input)
    settings = Settings(
        reduction, ignore_index, float(label_smoothing), float(z_loss), chunk or 0, cast or input.dtype,
        input.dtype if cast is None else torch.float32,
    )  # fmt: skip
    learned = token_weights is not None and token_weights.requires_grad and torch.is_grad_enabled()
    early = _early(settings, when, chunk, learned)
    # these need rules of their own: the original runs, with all logits
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        return _original(target, class_weight, token_weights, settings)(input, weight, bias)
    if learned:
        return _with_learned_weights(input, weight, bias, target, class_weight, token_weights, settings)
    tensors = (input, weight, bias, target, class_weight, token_weights)
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in tensors[:3]):
        early = False
    return (_Early if early else _Late).apply(*tensors, settings)


class _Late(torch.autograd.Function):
    """Keeps a logsumexp per token; gradients are made in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        class_weight: torch.Tensor | None,
        token_weights: torch.Tensor | None,
        settings: Settings,
    ) -> torch.Tensor:
        losses, lse = chunks.chunked_losses(x, weight, bias, target, class_weight, *settings[1:6])
        ctx.settings = settings
        ctx.save_for_backward(x, weight, bias, target, class_weight, token_weights, lse)
        return _reduced(losses, target, class_weight, token_weights, settings)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        *inputs, lse = ctx.saved_tensors
        x, weight, bias, target, class_weight, token_weights = inputs
        settings, needed = ctx.settings, list(ctx.needs_input_grad[:3])
        with conditions.without_autocast(x):
            if torch.is_grad_enabled() and not _bits.is_traced():
                original = _original(target, class_weight, token_weights, settings)
                found = differentiable_again(original, (x, weight, bias), needed, g)
                return *found, None, None, None, None
            factor = _factors(target, class_weight, token_weights, settings) * g.flatten()
            options = (class_weight, *settings[1:6], needed)
            found = chunks.chunked_gradients(x, weight, bias, target, lse, factor, *options)
        return *(t if need else None for t, need in zip(found, needed, strict=True)), None, None, None, None


class _Early(torch.autograd.Function):
    """Keeps gradients, made in the forward; the backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        class_weight: torch.Tensor | None,
        token_weights: torch.Tensor | None,
        settings: Settings,
    ) -> torch.Tensor:
        needed = list(ctx.needs_input_grad[:3])
        factor = _factors(target, class_weight, token_weights, settings)
        options = (class_weight, *settings[1:6], needed)
        losses, *found = chunks.losses_and_gradients(x, weight, bias, target, factor, *options)
        ctx.save_for_backward(*(t if need else None for t, need in zip(found, needed, strict=True)))
        return _reduced(losses, target, class_weight, token_weights, settings)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        if torch.is_grad_enabled() and not _bits.is_traced():
            raise DoubleBackwardError(
                "a gradient of linear_cross_entropy cannot be differentiated again: it was made in the forward "
                '(create_graph=True). Call it with when="backward", which can.'
            )
        return *(None if t is None else t * g.to(t.dtype) for t in ctx.saved_tensors), None, None, None, None


def _with_learned_weights(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    token_weights: Any,
    settings: Settings,
) -> torch.Tensor:
    """Autograd itself differentiates the reduction where the token weights need gradients too."""
    kind = chunks.statistics_type(settings.dtype)
    per_token = settings._replace(reduction="none", result=kind)
    losses = _Late.apply(x, weight, bias, target, class_weight, None, per_token)
    valid = target.ne(settings.ignore_index)
    weights = torch.where(valid, token_weights.to(kind), 0.0)
    losses = losses * weights
    if settings.reduction == "none":
        return losses.to(settings.result)
    loss = losses.sum()
    if settings.reduction == "mean":
        loss = loss / _denominator(weights.flatten(), target.flatten(), class_weight, settings)
    return loss.to(settings.result)


def _reduced(
    losses: torch.Tensor,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    token_weights: torch.Tensor | None,
    settings: Settings,
) -> torch.Tensor:
    weights = _weights(losses.dtype, target, token_weights, settings)
    if token_weights is not None:
        losses = losses * weights
    if settings.reduction == "none":
        return losses.view(target.shape).to(settings.result)
    loss = losses.sum()
    if settings.reduction == "mean":
        loss = loss / _denominator(weights, target.flatten(), class_weight, settings)
    return loss.to(settings.result)


def _weights(
    kind: torch.dtype, target: torch.Tensor, token_weights: torch.Tensor | None, settings: Settings
) -> torch.Tensor:
    """Per token, and zero where it is ignored."""
    valid = target.flatten().ne(settings.ignore_index)
    return valid.to(kind) if token_weights is None else torch.where(valid, token_weights.flatten().to(kind), 0.0)


def _denominator(
    weights: torch.Tensor, target: torch.Tensor, class_weight: torch.Tensor | None, settings: Settings
) -> torch.Tensor:
    if class_weight is not None:
        # an ignored target may lie anywhere, and what is out of range the operator refuses
        inside = target.clamp(0, class_weight.numel() - 1)
        weights = weights * class_weight.to(weights.dtype)[inside]
    return weights.sum()


def _factors(
    target: torch.Tensor, class_weight: torch.Tensor | None, token_weights: torch.Tensor | None, settings: Settings
) -> torch.Tensor:
    """What each token's loss is multiplied by in the result."""
    weights = _weights(chunks.statistics_type(settings.dtype), target, token_weights, settings)
    if settings.reduction != "mean":
        return weights
    target = target.flatten()
    whole = _denominator(weights, target, class_weight, settings)
    return torch.where(target.ne(settings.ignore_index), weights / whole, 0.0)  # zero where the mean is of none


def _original(
    target: torch.Tensor, class_weight: torch.Tensor | None, token_weights: torch.Tensor | None, settings: Settings
) -> Any:
    """The same in plain PyTorch, with all logits: for whoever differentiates twice."""
    kind = chunks.statistics_type(settings.dtype)

    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        cast = conditions.cast
        logits = F.linear(*(cast(t, settings.dtype) for t in (x, weight, bias)))
        logits = logits.reshape(-1, weight.shape[0]).to(kind)
        flat = target.flatten().long()
        losses = F.cross_entropy(
            logits, flat, None if class_weight is None else class_weight.to(kind), reduction="none",
            ignore_index=settings.ignore_index, label_smoothing=settings.smoothing,
        )  # fmt: skip
        if settings.z:
            square = logits.logsumexp(-1).square() * settings.z
            losses = losses + torch.where(flat.ne(settings.ignore_index), square, 0.0)
        return _reduced(losses, target, class_weight, token_weights, settings)

    return run


def _early(settings: Settings, when: str | None, chunk: int | None, learned: bool) -> bool:
    """Whether gradients are made in the forward; and a check of the options."""
    if settings.reduction not in _REDUCTIONS:
        raise PolicyError(f"there is no reduction {settings.reduction!r}. Take one of {', '.join(_REDUCTIONS)}.")
    if when not in _TIMES:
        raise PolicyError(f'gradients cannot be made at when={when!r}. Write "forward", "backward" or None.')
    if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
        raise PolicyError(f"a chunk of {chunk!r} tokens means nothing. Give a positive whole number, or None.")
    if not 0 <= settings.smoothing <= 1:
        raise PolicyError(f"label_smoothing={settings.smoothing} is not between 0 and 1. Give a part of one.")
    reason = None
    if settings.reduction == "none":
        reason = 'every token has a gradient of its own with reduction="none"'
    elif learned:
        reason = "the token weights need gradients too"
    elif settings.dtype == torch.float16:
        reason = "float16 would lose small ones before the loss's scale reaches them"
    if when == "forward" and reason is not None:
        raise PolicyError(f'gradients cannot be made in the forward: {reason}. Write when="backward" or None.')
    return reason is None and when != "backward"


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    token_weights: torch.Tensor | None,
) -> None:
    if target.is_floating_point() or target.dtype == torch.bool:
        raise PolicyError(
            f"linear_cross_entropy takes class indices, and the target is {target.dtype}. For class probabilities "
            "call torch.nn.functional.cross_entropy on the logits."
        )
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1] or x.shape[:-1] != target.shape:
        raise PolicyError(
            f"input {tuple(x.shape)}, weight {tuple(weight.shape)} and target {tuple(target.shape)} do not fit "
            "together. They are (..., in), (classes, in) and (...)."
        )
    if token_weights is not None and token_weights.shape != target.shape:
        raise PolicyError(
            f"token_weights {tuple(token_weights.shape)} do not fit the target {tuple(target.shape)}. Give one for "
            "each token."
        )
    if class_weight is not None and (class_weight.shape != weight.shape[:1] or class_weight.requires_grad):
        raise PolicyError(
            f"class_weight {tuple(class_weight.shape)} must have one number per class ({weight.shape[0]}), and no "
            "gradient. Give a plain vector."
        )
