"""`smp.nn.DistributedTransformerLMHead`: embeddings, a `DistributedTransformer` and a tied head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atorch.errors import ArgumentError
from atorch.smp.nn.layers import DistributedModule, drawn_normal
from atorch.smp.nn.transformer import DistributedTransformer

MASKED = -1e4
"""The value added to the scores of a masked position."""


class DistributedTransformerLMHead(DistributedModule):
    """A language model whose tied word embedding and head are split over the vocabulary.

    forward: takes a tuple (input_ids, attention_mask, token_type_ids, position_ids, labels), or with
    `add_cross_attention` (input_ids, attention_mask, token_type_ids, position_ids, cross_states, cross_mask, labels).
    All but input_ids, (batch, seq), may be None. attention_mask, (batch, seq), is 1 where a position is masked, else
    0. cross_mask, (batch, 1, 1, cross seq), is added to the scores.

    Returns the logits, (batch, seq, vocab_size), or (loss, logits) if labels, (batch, seq), are given: the loss is the
    mean cross entropy, which ignores −100. Under a causal mask the labels are the input_ids, and each position predicts
    the next one. Without a head it returns the hidden states, (batch, seq, hidden_size).

    Args:
        num_positions: number of position embeddings.
        num_token_types: number of token type embeddings, which are added if token_type_ids are given; 0 for none.
        add_lm_head: compute logits.
        final_layernorm: apply a layer norm after the last layer, as GPT-2 does.
        others: as for `DistributedTransformer`.

    Raises:
        ArgumentError: as `DistributedTransformer`; in forward, labels without a head, types without an embedding,
            or a tuple of another length.
    """

    def __init__(
        self, num_layers: int = 12, num_attention_heads: int = 32, attention_head_size: int = 32,
        hidden_size: int = 1024, intermediate_size: int = 4096, vocab_size: int = 30522, num_positions: int = 1024,
        attention_dropout_prob: float = 0.1, hidden_dropout_prob: float = 0.1, activation: str = "gelu",
        layernorm_epsilon: float = 1e-5, num_token_types: int = 0, causal_mask_size: int | None = None,
        add_cross_attention: bool = False, add_lm_head: bool = True, initializer_range: float = 0.02,
        use_normal_initialization: bool = False, pre_layernorm: bool = False, post_layernorm: bool = True,
        use_alibi: bool = False, alibi_bias_max: int = 8, final_layernorm: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.is_causal = causal_mask_size is not None
        self.add_cross_attention = add_cross_attention
        self.word_embedding = nn.Embedding(vocab_size, hidden_size)
        self.position_embedding = nn.Embedding(num_positions, hidden_size)
        self.token_type_embedding = nn.Embedding(num_token_types, hidden_size) if num_token_types else None
        self.transformer = DistributedTransformer(
            num_layers, num_attention_heads, attention_head_size, hidden_size, intermediate_size,
            attention_dropout_prob, hidden_dropout_prob, activation, layernorm_epsilon, initializer_range,
            use_normal_initialization, causal_mask_size, add_cross_attention, pre_layernorm, post_layernorm,
            use_alibi, alibi_bias_max,
        )  # fmt: skip
        self.layernorm = nn.LayerNorm(hidden_size, layernorm_epsilon) if final_layernorm else None
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False) if add_lm_head else None
        if self.lm_head is not None:
            self.lm_head.weight = self.word_embedding.weight
        if use_normal_initialization:
            drawn_normal(self, initializer_range)

    def forward(self, inputs: tuple[Tensor | None, ...]) -> Tensor | tuple[Tensor, Tensor]:
        """Logits; (loss, logits) with labels; hidden states without a head."""
        expected = 7 if self.add_cross_attention else 5
        if len(inputs) != expected:
            raise ArgumentError(
                f"DistributedTransformerLMHead was called with {len(inputs)} inputs; give a tuple of {expected}: "
                "input_ids, attention_mask, token_type_ids, position_ids, "
                f"{'cross_states, cross_mask, ' * self.add_cross_attention}labels"
            )
        ids, mask, types, positions, *cross, labels = inputs
        assert ids is not None
        if mask is not None:
            mask = mask[:, None, None, :].to(self.word_embedding.weight.dtype) * MASKED
        hidden = self._embedded(ids, types, positions)
        states = (hidden, cross[0], mask, cross[1]) if self.add_cross_attention else (hidden, mask)
        hidden_after = self.transformer(states)[0]
        if self.layernorm is not None:
            hidden_after = self.layernorm(hidden_after)
        if self.lm_head is None:
            if labels is not None:
                raise ArgumentError("labels were given to a model without a head; make it with add_lm_head True")
            result: Tensor = hidden_after
            return result
        logits: Tensor = self.lm_head(hidden_after)
        return logits if labels is None else (self._loss(logits, labels), logits)

    def _embedded(self, ids: Tensor, types: Tensor | None, positions: Tensor | None) -> Tensor:
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        hidden: Tensor = self.word_embedding(ids) + self.position_embedding(positions)
        if types is None:
            return hidden
        if self.token_type_embedding is None:
            raise ArgumentError("token_type_ids were given to a model without types; make it with num_token_types")
        typed: Tensor = hidden + self.token_type_embedding(types)
        return typed

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.is_causal:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
