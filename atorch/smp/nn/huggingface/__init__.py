"""Translation of Hugging Face state dicts to the names of `smp.nn`'s modules, and back."""

from atorch.smp.nn.huggingface import bert, gpt2, gptj, gptneo, roberta

__all__ = ["bert", "gpt2", "gptj", "gptneo", "roberta"]
