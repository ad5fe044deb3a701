"""GPT-2: names of `GPT2LMHeadModel` and of `smp.nn.DistributedTransformerLMHead`.

Construct the latter with `pre_layernorm=True`, `post_layernorm=False`, `final_layernorm=True`,
`activation="gelu_new"` and a `causal_mask_size`. It has no dropout of embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atorch.smp.nn.huggingface.naming import Naming

_NAMING = Naming(
    "GPT-2",
    ("transformer.h", "transformer.seq_layers"),
    {
        "ln_1": ("attention.pre_layernorm",),
        "attn.c_attn": ("attention.query", "attention.key", "attention.value"),
        "attn.c_proj": ("attention.dense",),
        "ln_cross_attn": ("cross_attention.pre_layernorm",),
        "crossattention.q_attn": ("cross_attention.query",),
        "crossattention.c_attn": ("cross_attention.key", "cross_attention.value"),
        "crossattention.c_proj": ("cross_attention.dense",),
        "ln_2": ("output.pre_layernorm",),
        "mlp.c_fc": ("output.dense1",),
        "mlp.c_proj": ("output.dense2",),
    },
    {
        "transformer.wte.weight": "word_embedding.weight",
        "transformer.wpe.weight": "position_embedding.weight",
        "transformer.ln_f.weight": "layernorm.weight",
        "transformer.ln_f.bias": "layernorm.bias",
        "lm_head.weight": "lm_head.weight",
    },
    is_transposed=True,
    left_out=(".attn.bias", ".attn.masked_bias"),
)


def translate_hf_state_dict_to_smdistributed_gpt2(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> dict[str, Any]:
    """Translate a state of Hugging Face's GPT-2 to the names of `smp.nn`.

    It is returned unchanged if it has them already, or if the script's `smp.DistributedModel` has Hugging Face's.

    Args:
        max_seq_len: accepted without effect: causal masks, which old states contain, are left out.

    Raises:
        ArgumentError: the state is partial, is of another model, or has a name without a counterpart in `smp.nn`.
    """
    return _NAMING.to_smp(state_dict)


def translate_state_dict_to_hf_gpt2(state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
    """Translate a state of `smp.nn` to the names of Hugging Face's GPT-2, unless it has them already.

    Arguments and exceptions are those of the other direction.
    """
    return _NAMING.to_hf(state_dict)


translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2
