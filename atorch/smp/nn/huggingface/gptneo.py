"""GPT-Neo, for which `smp.nn` has no module: states keep Hugging Face's names, as GPT-J's do."""

from atorch.smp.nn.huggingface import gptj

translate_hf_state_dict_to_smdistributed_gptneo = gptj.translate_hf_state_dict_to_smdistributed_gptj
translate_state_dict_to_hf_gptneo = gptj.translate_state_dict_to_hf_gptj
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptneo
