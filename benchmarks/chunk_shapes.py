"""Models of published shapes with their predicted training passes, for layouts and schedules of chunks.

Nothing is allocated: parameters are on the meta device, and passes run on fake tensors, in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import nn

    from atorch.runtime.chunk.pass_schedule import AccessTrace


class Workload(NamedTuple):
    """A model's parameters by name, tied ones once, and its predicted pass on one batch."""

    name: str
    parameters: Mapping[str, nn.Parameter]
    traced: AccessTrace


def gpt2(hidden: int, blocks: int, heads: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(n_embd=hidden, n_layer=blocks, n_head=heads, use_cache=False, loss_type="ForCausalLM")
    )


def bert(hidden: int, blocks: int, heads: int) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            hidden_size=hidden, num_hidden_layers=blocks, num_attention_heads=heads, intermediate_size=4 * hidden
        )
    )


def llama(hidden: int, ffn: int, blocks: int, tied: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=128256, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=blocks, num_attention_heads=32,
        num_key_value_heads=8, tie_word_embeddings=tied, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(shape)


def vit(hidden: int, blocks: int, heads: int, patch: int) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    shape = ViTConfig(
        hidden_size=hidden, num_hidden_layers=blocks, num_attention_heads=heads, intermediate_size=4 * hidden,
        patch_size=patch, num_labels=1000, problem_type="single_label_classification",
    )  # fmt: skip
    return ViTForImageClassification(shape)


def tokens() -> dict[str, Any]:
    """A batch of 4 sequences of 512 tokens."""
    import torch

    ids = torch.zeros(4, 512, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def images() -> dict[str, Any]:
    """A batch of 8 images of 224 × 224."""
    import torch

    return {
        "pixel_values": torch.zeros(8, 3, 224, 224, dtype=torch.bfloat16),
        "labels": torch.zeros(8, dtype=torch.long),
    }


MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "GPT-2 124M": (lambda: gpt2(768, 12, 12), tokens),
    "GPT-2 1.5B": (lambda: gpt2(1600, 48, 25), tokens),
    "BERT 110M": (lambda: bert(768, 12, 12), tokens),
    "BERT 335M": (lambda: bert(1024, 24, 16), tokens),
    "Llama-3.2 1B": (lambda: llama(2048, 8192, 16, tied=True), tokens),
    "Llama-3.1 8B": (lambda: llama(4096, 14336, 32, tied=False), tokens),
    "ViT-B/16": (lambda: vit(768, 12, 12, 16), images),
    "ViT-H/14": (lambda: vit(1280, 32, 16, 14), images),
}


def workloads(quick: bool = False) -> Iterator[Workload]:
    """All models one after another, the first alone if `quick`."""
    import torch

    from atorch.auto.opt_lib.chunk.trace import trace_pass

    for name, (make, batch) in list(MODELS.items())[: 1 if quick else None]:
        with torch.device("meta"):
            model = make()
        seen = trace_pass(
            model, batch(), lambda model, batch: model(**batch).loss, device_type="cpu", dtype=torch.bfloat16
        )
        yield Workload(name, dict(model.named_parameters()), seen)
