"""RoBERTa: names of `RobertaEncoder` in any model, which are those of BERT's encoder."""

from atorch.smp.nn.huggingface.bert import (
    translate_hf_state_dict_to_smdistributed_bert as translate_hf_state_dict_to_smdistributed_roberta,
)
from atorch.smp.nn.huggingface.bert import translate_state_dict_to_hf_bert as translate_state_dict_to_hf_roberta

__all__ = [
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_roberta",
    "translate_state_dict_to_hf_roberta",
    "translate_state_dict_to_smdistributed",
]

translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_roberta
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_roberta
