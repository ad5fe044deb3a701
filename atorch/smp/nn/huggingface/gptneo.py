"""GPT-Neo, for which `smp.nn` has no module: states keep Hugging Face's names, as GPT-J's do."""

from atorch.smp.nn.huggingface.gptj import (
    translate_hf_state_dict_to_smdistributed_gptj as translate_hf_state_dict_to_smdistributed_gptneo,
)
from atorch.smp.nn.huggingface.gptj import translate_state_dict_to_hf_gptj as translate_state_dict_to_hf_gptneo

__all__ = [
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gptneo",
    "translate_state_dict_to_hf_gptneo",
]

translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptneo
