"""Functions that translate states of Hugging Face's models to the names of `smp.nn`'s modules, and back."""

from atorch.smp.nn.huggingface import bert, gpt2, gptj, gptneo, roberta

__all__ = ["bert", "gpt2", "gptj", "gptneo", "roberta"]
