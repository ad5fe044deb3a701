"""`smp.nn.DistributedAttentionLayer`: self- or cross-attention, its linear map, residual and layer norms."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atorch.errors import ArgumentError
from atorch.smp.nn.distributed_module import DistributedModule, drawn_normal, need_layernorm


class DistributedAttentionLayer(DistributedModule):
    """Attention over hidden states (batch, seq, hidden_size), with its heads split over the tensor ranks.

    forward: takes (hidden_states, attention_mask), or (hidden_states, cross_states, attention_mask) with
    `cross_attention`; returns a tensor like hidden_states. The mask, (batch, 1, 1, key length) or None, is added to
    the scores.

    Args:
        num_attention_heads, attention_head_size: of the whole layer, over all tensor ranks.
        causal_mask_size: the longest sequence under a causal mask; None for no mask. Cross attention ignores it.
        use_normal_initialization: draw normal weights with standard deviation `initializer_range`, and zero the
            biases; else torch's initialization.
        pre_layernorm: apply a layer norm to the input, but not to the residual.
        post_layernorm: apply one after the residual is added.

    Raises:
        ArgumentError: neither `pre_layernorm` nor `post_layernorm` is set; in forward, a sequence is longer than
            `causal_mask_size`.
    """

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        cross_attention: bool = False,
        causal_mask_size: int | None = None,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
    ) -> None:
        super().__init__()
        need_layernorm("DistributedAttentionLayer", pre_layernorm, post_layernorm)
        width = num_attention_heads * attention_head_size
        self.attention_head_size = attention_head_size
        self.attention_dropout_prob = attention_dropout_prob
        self.is_cross_attention = cross_attention
        self.causal_mask_size = None if cross_attention else causal_mask_size
        self.query = nn.Linear(hidden_size, width)
        self.key = nn.Linear(hidden_size, width)
        self.value = nn.Linear(hidden_size, width)
        self.dense = nn.Linear(width, hidden_size)
        self.dropout = nn.Dropout(hidden_dropout_prob)
        self.pre_layernorm = nn.LayerNorm(hidden_size, layernorm_epsilon) if pre_layernorm else None
        self.layernorm = nn.LayerNorm(hidden_size, layernorm_epsilon) if post_layernorm else None
        if use_normal_initialization:
            drawn_normal(self, initializer_range)

    def forward(self, inputs: tuple[Tensor | None, ...]) -> Tensor:
        hidden, *cross, mask = inputs
        assert hidden is not None
        normed = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        others = cross[0] if self.is_cross_attention else normed
        query, key, value = (self._heads(flat) for flat in (self.query(normed), self.key(others), self.value(others)))
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=self._scores_mask(mask, query),
            dropout_p=self.attention_dropout_prob if self.training else 0.0,
            is_causal=mask is None and self.causal_mask_size is not None,
        )
        result: Tensor = self.dropout(self.dense(mixed.transpose(1, 2).flatten(2))) + hidden
        return result if self.layernorm is None else self.layernorm(result)

    def _heads(self, projected: Tensor) -> Tensor:
        """(batch, seq, local heads × size) → (batch, local heads, seq, size)."""
        heads: Tensor = projected.unflatten(-1, (-1, self.attention_head_size))
        return heads.transpose(1, 2)

    def _scores_mask(self, mask: Tensor | None, query: Tensor) -> Tensor | None:
        """The mask added to the scores; None also for a causal mask alone, which the kernel applies itself."""
        length = query.shape[2]
        if self.causal_mask_size is not None and length > self.causal_mask_size:
            raise ArgumentError(
                f"the sequence has {length} tokens, and causal_mask_size is {self.causal_mask_size}; give shorter "
                "ones, or make the layer for as many"
            )
        if mask is None:
            return None
        mask = mask.to(query.dtype)
        if self.causal_mask_size is None:
            return mask
        later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        return mask.masked_fill(later, float("-inf"))
