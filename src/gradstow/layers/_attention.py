"""Multi-head attention that keeps no queries × keys tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from gradstow.layers.ops._attention import attention

Tensor = torch.Tensor


class Attention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` over ``attention``, in training, where the weights are not asked for.

    Call it with ``need_weights=False``: the weights are a queries × keys tensor, and asking for them (torch's default)
    runs the original. So do nested tensors, ``add_bias_kv``, ``add_zero_attn`` and a forward that nothing
    differentiates. Kept for the backward: the inputs, query, key and value, the attention's output, the masks as they
    were given, and what ``attention`` states. With dropout its numbers are another draw than torch's.

    A boolean padding mask and the attention mask are not made floats, and are merged only where both are given without
    ``is_causal``: batch × queries × keys booleans, in place of batch × heads × queries × keys floats.
    """

    chunk: int | None = None
    """Rows of attention that are computed at a time; None leaves it to ``attention``."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As in torch: (L, N, E), or (N, L, E) with ``batch_first``, or (L, E)."""
        masks = (key_padding_mask, attn_mask)
        if need_weights or not self._can_be_lean(query, key, value, masks, is_causal):
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        first = self.batch_first or not batched
        query, key, value = (self._heads(x, first) for x in self._projected(query, key, value))
        causal = is_causal and attn_mask is not None
        mask = _merged(None if causal else attn_mask, key_padding_mask, query.shape[:2])
        dropout = self.dropout if self.training else 0.0
        result = attention(query, key, value, mask, dropout, causal, chunk=self.chunk)
        result = (result.transpose(1, 2) if first else result.permute(2, 0, 1, 3)).flatten(2)
        result = F.linear(result, self.out_proj.weight, self.out_proj.bias)
        return (result if batched else result.squeeze(0)), None

    def _can_be_lean(
        self, query: Tensor, key: Tensor, value: Tensor, masks: tuple[Tensor | None, Tensor | None], causal: bool
    ) -> bool:
        """Wrong shapes are left to the original too, which names them."""
        inputs = [query, key, value]
        used = [*inputs, *self.parameters(), *(m for m in masks if m is not None)]
        if not torch.is_grad_enabled() or not any(x.requires_grad for x in used) or any(x.is_nested for x in inputs):
            return False
        if self.bias_k is not None or self.bias_v is not None or self.add_zero_attn:
            return False
        if query.dim() not in (2, 3) or key.dim() != query.dim() or key.shape[:-1] != value.shape[:-1]:
            return False
        batch, length = (0, 1) if self.batch_first else (1, 0)
        samples, queries = (query.shape[batch], query.shape[length]) if query.dim() == 3 else (1, query.shape[0])
        keys = key.shape[length] if query.dim() == 3 else key.shape[0]
        if query.dim() == 3 and key.shape[batch] != samples:
            return False
        padding, mask = masks
        padded = (keys,) if query.dim() == 2 else (samples, keys)
        if padding is not None and (padding.shape != padded or not _is_mask(padding)):
            return False
        if mask is None:
            return not causal
        return _is_mask(mask) and mask.shape in ((queries, keys), (samples * self.num_heads, queries, keys))

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        """By one product where the inputs are one, as torch has it, which keeps its result as one tensor."""
        if not self._qkv_same_embed_dim:
            weights: Any = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        elif query is key and key is value:
            return F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            weights = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if self._qkv_same_embed_dim and key is value:
            bias = None if self.in_proj_bias is None else self.in_proj_bias[self.embed_dim :]
            pair = F.linear(key, self.in_proj_weight[self.embed_dim :], bias)
            return F.linear(query, weights[0], biases[0]), *pair.chunk(2, -1)
        return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))

    def _heads(self, x: Tensor, batch_first: bool) -> Tensor:
        """(N, H, L, E / H), a view."""
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        return x.transpose(1, 2) if batch_first else x.permute(1, 2, 0, 3)


def _is_mask(mask: Tensor) -> bool:
    return mask.dtype == torch.bool or mask.is_floating_point()


def _merged(mask: Tensor | None, padding: Tensor | None, sizes: torch.Size) -> Tensor | None:
    """One mask that broadcasts to (N, H, L, S), boolean where both are; True in torch's modules means left out."""
    if mask is not None:
        mask = mask.unflatten(0, sizes) if mask.dim() == 3 else mask[None, None]
    if padding is not None:
        padding = padding[:, None, None]
    given = [m for m in (mask, padding) if m is not None]
    if not given:
        return None
    if all(m.dtype == torch.bool for m in given):
        left_out = given[0] if len(given) == 1 else given[0] | given[1]
        return left_out.logical_not()
    one, *rest = (_added(m, given) for m in given)
    return one + rest[0] if rest else one


def _added(mask: Tensor, given: list[Tensor]) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    floating = next(m.dtype for m in given if m.dtype != torch.bool)
    return torch.zeros(mask.shape, dtype=floating, device=mask.device).masked_fill_(mask, float("-inf"))
