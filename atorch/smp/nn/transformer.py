"""`smp.nn.DistributedTransformer` and its layers, and `DistributedTransformerLMHead`, with embeddings and a head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atorch.errors import ArgumentError, near_miss, shown
from atorch.smp.nn.layers import DistributedModule, drawn_normal, need_layernorm, refuse


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
        self, num_attention_heads: int = 32, attention_head_size: int = 32, hidden_size: int = 1024,
        attention_dropout_prob: float = 0.1, hidden_dropout_prob: float = 0.1, layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02, use_normal_initialization: bool = False, cross_attention: bool = False,
        causal_mask_size: int | None = None, pre_layernorm: bool = False, post_layernorm: bool = True,
    ) -> None:  # fmt: skip
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


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
States = tuple[Tensor | None, ...]
"""(hidden_states, attention_mask); with cross attention (hidden_states, cross_states, attention_mask, cross_mask)."""


class DistributedTransformerOutputLayer(DistributedModule):
    """The two linear maps of a transformer layer, hidden_size → intermediate_size → hidden_size, and the residual.

    forward: maps hidden states (batch, seq, hidden_size) to the same shape. `intermediate_size` is split over the
    tensor ranks.

    Args:
        activation: "gelu", "relu", or GPT-2's "gelu_new".
        fp32_residual_addition: add and normalize the residual in fp32, so that the sum does not overflow fp16.
        pre_layernorm, post_layernorm, use_normal_initialization: as for `DistributedAttentionLayer`.

    Raises:
        ArgumentError: no layer norm, or an unknown activation.
    """

    def __init__(
        self, hidden_size: int = 1024, intermediate_size: int = 4096, hidden_dropout_prob: float = 0.1,
        activation: str = "gelu", layernorm_epsilon: float = 1e-5, initializer_range: float = 0.02,
        use_normal_initialization: bool = False, pre_layernorm: bool = False, post_layernorm: bool = True,
        fp32_residual_addition: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        need_layernorm("DistributedTransformerOutputLayer", pre_layernorm, post_layernorm)
        if activation not in ACTIVATIONS:
            raise ArgumentError(f"activation was given {shown(activation)}; {near_miss(str(activation), ACTIVATIONS)}")
        self.activation = activation
        self.fp32_residual_addition = fp32_residual_addition
        self.dense1 = nn.Linear(hidden_size, intermediate_size)
        self.dense2 = nn.Linear(intermediate_size, hidden_size)
        self.dropout = nn.Dropout(hidden_dropout_prob)
        self.pre_layernorm = nn.LayerNorm(hidden_size, layernorm_epsilon) if pre_layernorm else None
        self.layernorm = nn.LayerNorm(hidden_size, layernorm_epsilon) if post_layernorm else None
        if use_normal_initialization:
            drawn_normal(self, initializer_range)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        mapped: Tensor = self.dropout(self.dense2(ACTIVATIONS[self.activation](self.dense1(normed))))
        if self.fp32_residual_addition:
            return self._normed_in_fp32(mapped.float() + hidden.float()).to(hidden.dtype)
        result = mapped + hidden
        return result if self.layernorm is None else self.layernorm(result)

    def _normed_in_fp32(self, result: Tensor) -> Tensor:
        norm = self.layernorm
        if norm is None:
            return result
        return F.layer_norm(result, norm.normalized_shape, norm.weight.float(), norm.bias.float(), norm.eps)


class DistributedTransformerLayer(DistributedModule):
    """A transformer layer: attention, optional cross attention, and the output layer.

    forward: maps `States` to `States`; only hidden_states change.

    Args:
        add_cross_attention: attend to cross_states (batch, cross seq, hidden_size) after the self-attention.
        use_alibi, alibi_bias_max: only the defaults are supported.
        others: as for `DistributedAttentionLayer` and `DistributedTransformerOutputLayer`.

    Raises:
        ArgumentError: as these two, or `use_alibi` is set.
    """

    def __init__(
        self, num_attention_heads: int = 32, attention_head_size: int = 32, hidden_size: int = 1024,
        intermediate_size: int = 4096, attention_dropout_prob: float = 0.1, hidden_dropout_prob: float = 0.1,
        activation: str = "gelu", layernorm_epsilon: float = 1e-5, initializer_range: float = 0.02,
        use_normal_initialization: bool = False, causal_mask_size: int | None = None, add_cross_attention: bool = False,
        pre_layernorm: bool = False, post_layernorm: bool = True, use_alibi: bool = False, alibi_bias_max: int = 8,
    ) -> None:  # fmt: skip
        super().__init__()
        alibi = {"use_alibi": use_alibi, "alibi_bias_max": alibi_bias_max}
        refuse("DistributedTransformerLayer", alibi, {"use_alibi": False, "alibi_bias_max": 8})
        self.add_cross_attention = add_cross_attention
        shared: dict[str, Any] = {
            "hidden_size": hidden_size, "hidden_dropout_prob": hidden_dropout_prob,
            "layernorm_epsilon": layernorm_epsilon, "initializer_range": initializer_range,
            "use_normal_initialization": use_normal_initialization, "pre_layernorm": pre_layernorm,
            "post_layernorm": post_layernorm,
        }  # fmt: skip
        attention = partial(
            DistributedAttentionLayer, num_attention_heads, attention_head_size,
            attention_dropout_prob=attention_dropout_prob, **shared,
        )  # fmt: skip
        self.attention = attention(causal_mask_size=causal_mask_size)
        self.cross_attention = attention(cross_attention=True) if add_cross_attention else None
        self.output = DistributedTransformerOutputLayer(
            **shared, intermediate_size=intermediate_size, activation=activation
        )

    def forward(self, inputs: States) -> States:
        if self.cross_attention is None:
            hidden, mask = inputs
            return self.output(self.attention((hidden, mask))), mask
        hidden, cross, mask, cross_mask = inputs
        attended = self.cross_attention((self.attention((hidden, mask)), cross, cross_mask))
        return self.output(attended), cross, mask, cross_mask


class DistributedTransformer(DistributedModule):
    """A sequence of `num_layers` layers, `seq_layers`.

    Other arguments and forward are those of `DistributedTransformerLayer`.
    """

    def __init__(
        self, num_layers: int = 12, num_attention_heads: int = 32, attention_head_size: int = 32,
        hidden_size: int = 1024, intermediate_size: int = 4096, attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1, activation: str = "gelu", layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02, use_normal_initialization: bool = False, causal_mask_size: int | None = None,
        add_cross_attention: bool = False, pre_layernorm: bool = False, post_layernorm: bool = True,
        use_alibi: bool = False, alibi_bias_max: int = 8,
    ) -> None:  # fmt: skip
        super().__init__()
        arguments = (
            num_attention_heads, attention_head_size, hidden_size, intermediate_size, attention_dropout_prob,
            hidden_dropout_prob, activation, layernorm_epsilon, initializer_range, use_normal_initialization,
            causal_mask_size, add_cross_attention, pre_layernorm, post_layernorm, use_alibi, alibi_bias_max,
        )  # fmt: skip
        self.seq_layers = nn.Sequential(*(DistributedTransformerLayer(*arguments) for _ in range(num_layers)))

    def forward(self, inputs: States) -> States:
        states: States = self.seq_layers(inputs)
        return states


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
