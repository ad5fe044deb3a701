"""GPT-J, for which `smp.nn` has no module: states keep Hugging Face's names. The same holds for GPT-Neo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atorch.smp.nn.huggingface.naming import kept


def translate_hf_state_dict_to_smdistributed_gptj(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> dict[str, Any]:
    """Return the state unchanged for the script's `smp.DistributedModel`, which has Hugging Face's names.

    Raises:
        ArgumentError: the model has other names, or there is no model.
    """
    return kept("GPT-J or GPT-Neo", state_dict)


def translate_state_dict_to_hf_gptj(state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
    """Return the state unchanged: it has Hugging Face's names."""
    return dict(state_dict)


translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptj
translate_hf_gptj_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptj
