"""BERT: names of `BertEncoder` in any model, and of `smp.nn.DistributedTransformer` with its defaults.

RoBERTa's encoder has the same names, so this translation serves it, too.
"""

from __future__ import annotations

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


translate_hf_state_dict_to_smdistributed_bert = _NAMING.to_smp
translate_state_dict_to_hf_bert = _NAMING.to_hf
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_bert
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_bert
