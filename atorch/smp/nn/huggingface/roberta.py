"""RoBERTa: `RobertaEncoder` in any of its models, and `smp.nn.DistributedTransformer` in its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atorch.smp.nn.huggingface.bert import encoder

_NAMING = encoder("RoBERTa")


def translate_hf_state_dict_to_smdistributed_roberta(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state of Hugging Face's RoBERTa, or of its encoder, with the names of `smp.nn` in the encoder.

    As it is where it has them, or where the script's `smp.DistributedModel` has Hugging Face's.

    Raises:
        ArgumentError: the state is partial, is of another model, or has a name that `smp.nn` has nothing for.
    """
    return _NAMING.to_smp(state_dict)


def translate_state_dict_to_hf_roberta(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state of `smp.nn` with the names of Hugging Face's RoBERTa; as it is where it has them.

    It raises what the other function does.
    """
    return _NAMING.to_hf(state_dict)


translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_roberta
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_roberta
