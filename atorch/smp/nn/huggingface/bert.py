"""BERT: `BertEncoder` in any of its models, and `smp.nn.DistributedTransformer` in its place, with its defaults.

RoBERTa's encoder has the same names, and this is its translation, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atorch.smp.nn.huggingface.naming import Naming


def _naming() -> Naming:
    inside = {"intermediate.dense": ("output.dense1",), "output.dense": ("output.dense2",)}
    for theirs, ours in (("attention", "attention"), ("crossattention", "cross_attention")):
        for name in ("query", "key", "value"):
            inside[f"{theirs}.self.{name}"] = (f"{ours}.{name}",)
        inside[f"{theirs}.output.dense"] = (f"{ours}.dense",)
        inside[f"{theirs}.output.LayerNorm"] = (f"{ours}.layernorm",)
    return Naming("BERT", ("layer", "seq_layers"), {**inside, "output.LayerNorm": ("output.layernorm",)})


_NAMING = _naming()


def translate_hf_state_dict_to_smdistributed_bert(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state of Hugging Face's BERT, or of its encoder, with the names of `smp.nn` in the encoder.

    As it is where it has them, or where the script's `smp.DistributedModel` has Hugging Face's.

    Raises:
        ArgumentError: the state is partial, is of another model, or has a name that `smp.nn` has nothing for.
    """
    return _NAMING.to_smp(state_dict)


def translate_state_dict_to_hf_bert(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state of `smp.nn` with the names of Hugging Face's BERT; as it is where it has them.

    It raises what the other function does.
    """
    return _NAMING.to_hf(state_dict)


translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_bert
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_bert
