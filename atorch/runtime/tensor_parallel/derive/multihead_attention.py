"""`nn.MultiheadAttention` with products that can be split; torch's own forward hides them in one function.

A rank has no attention weights of other ranks' heads, so that the returned weights are always None.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atorch.model.module_swap import recast, swap_modules, why_unswappable


class SplittableAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` (same arguments and state dict) for any number of its heads."""

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
    ) -> tuple[Tensor, None]:
        """Compute torch's forward, without attention weights."""
        is_batched = query.dim() == 3
        batch_dim = 0 if self.batch_first else 1
        weights, biases = self._projections()
        heads = []
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True):
            projected = F.linear(x, weight, bias)
            if is_batched and batch_dim:
                projected = projected.transpose(0, 1)
            projected = projected if is_batched else projected.unsqueeze(0)
            heads.append(projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2))
        mask = _combined(attn_mask, key_padding_mask, heads[0], is_batched)
        q, k, v = heads
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0
        )
        mixed = mixed.transpose(1, 2).flatten(2)
        if not is_batched:
            mixed = mixed.squeeze(0)
        elif batch_dim:
            mixed = mixed.transpose(0, 1)
        return self.out_proj(mixed), None

    def _projections(self) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        fused: Tensor | None = self.in_proj_weight
        weights = fused.chunk(3) if fused is not None else (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        bias: Tensor | None = self.in_proj_bias
        return weights, (None, None, None) if bias is None else bias.chunk(3)


def _combined(mask: Tensor | None, padding: Tensor | None, queries: Tensor, is_batched: bool) -> Tensor | None:
    """Both masks as one bias of the scores, (batch or 1, heads or 1, queries or 1, keys)."""
    total: Tensor | None = None
    if mask is not None:
        total = _added(mask, queries)
        total = total.unflatten(0, (queries.shape[0], -1)) if mask.dim() == 3 else total[None, None]
    if padding is not None:
        padding = _added(padding if is_batched else padding[None], queries)[:, None, None]
        total = padding if total is None else total + padding
    return total


def _added(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(mask, float("-inf"))


def make_splittable(model: nn.Module) -> None:
    """Replace every `nn.MultiheadAttention` below `model`, in place; those with extra keys and subclasses stay."""

    def choose(name: str, module: nn.Module) -> nn.Module | None:
        is_plain = type(module) is nn.MultiheadAttention and why_unswappable(module) is None
        if not name or not is_plain or module.bias_k is not None or module.add_zero_attn:
            return None
        twin = recast(module, SplittableAttention)
        twin._qkv_same_embed_dim = False  # torch's transformer layers then call forward, in evaluation too
        return twin

    swap_modules(model, choose)
