"""RoBERTa: names of `RobertaEncoder` in any model, which are those of BERT's encoder."""

from atorch.smp.nn.huggingface import bert

translate_hf_state_dict_to_smdistributed_roberta = bert.translate_hf_state_dict_to_smdistributed_bert
translate_state_dict_to_hf_roberta = bert.translate_state_dict_to_hf_bert
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_roberta
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_roberta
