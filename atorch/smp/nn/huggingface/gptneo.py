"""GPT-Neo, which no module of `smp.nn` computes: its states are the script's model's own, as GPT-J's are."""

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
