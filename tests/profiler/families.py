"""Small models of many families, each with a batch: what the trace is held to."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

from atorch.cost import ModelProfile
from atorch.profiler.trace import trace

VOCAB, HIDDEN, FFN, HEADS, KV_HEADS, LAYERS, BATCH, SEQ = 128, 32, 64, 4, 2, 3, 4, 16
COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "intermediate_size": FFN, "use_cache": False,
}  # fmt: skip
ENDS: Mapping[str, int] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
Given = tuple[nn.Module, dict[str, torch.Tensor]]


def tokens() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(0, VOCAB, (BATCH, SEQ)), "labels": torch.randint(0, VOCAB, (BATCH, SEQ))}


def images(size: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.randint(0, 2, (BATCH,))}


def llama() -> Given:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON, num_key_value_heads=KV_HEADS)), tokens()


def gpt2() -> Given:
    sizes = {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 2 * SEQ}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ENDS, use_cache=False)), tokens()


def bert() -> Given:
    return transformers.BertForMaskedLM(transformers.BertConfig(**COMMON)), tokens()


def t5() -> Given:
    sizes = {"vocab_size": VOCAB, "d_model": HIDDEN, "d_kv": 8, "d_ff": FFN, "num_layers": LAYERS, "num_heads": HEADS}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, use_cache=False)
    return transformers.T5ForConditionalGeneration(config), tokens()


def vit() -> Given:
    sizes = {name: value for name, value in COMMON.items() if name not in ("vocab_size", "use_cache")}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=16, patch_size=4)), images(
        16
    )


def mixtral() -> Given:
    config = transformers.MixtralConfig(
        **COMMON, num_key_value_heads=KV_HEADS, num_local_experts=4, num_experts_per_tok=2
    )
    return transformers.MixtralForCausalLM(config), tokens()


def deepseek() -> Given:
    config = transformers.DeepseekV3Config(
        **COMMON, num_key_value_heads=HEADS, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1,
        moe_intermediate_size=16, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=24, qk_rope_head_dim=4,
        qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config), tokens()


def gpt_oss() -> Given:
    config = transformers.GptOssConfig(
        **COMMON, **ENDS, num_key_value_heads=KV_HEADS, head_dim=8, num_local_experts=4, num_experts_per_tok=2
    )
    return transformers.GptOssForCausalLM(config), tokens()


def albert() -> Given:
    sizes = {name: value for name, value in COMMON.items() if name != "use_cache"}
    return transformers.AlbertForMaskedLM(transformers.AlbertConfig(**sizes, embedding_size=16)), tokens()


def gemma() -> Given:
    return transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**COMMON, num_key_value_heads=KV_HEADS, head_dim=8)
    ), tokens()


def qwen() -> Given:
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**COMMON, num_key_value_heads=KV_HEADS, head_dim=8)
    ), tokens()


def falcon() -> Given:
    sizes = {name: value for name, value in COMMON.items() if name != "intermediate_size"}
    return transformers.FalconForCausalLM(transformers.FalconConfig(**sizes, **ENDS)), tokens()


def adapted() -> Given:
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    model, batch = llama()
    return get_peft_model(model, LoraConfig(r=2, target_modules=targets)), batch


class Residual(nn.Module):
    """A block of a residual network; its first convolution may halve the image."""

    def __init__(self, before: int, channels: int) -> None:
        super().__init__()
        stride = channels // before
        self.body = nn.Sequential(
            nn.Conv2d(before, channels, 3, stride, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip
        self.short = nn.Conv2d(before, channels, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.short(images) + self.body(images))


class ResNet(nn.Module):
    """Stem, two stages of two and three blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 7, 2, padding=3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.layer1 = nn.Sequential(Residual(8, 8), Residual(8, 8))
        self.layer2 = nn.Sequential(Residual(8, 16), Residual(16, 16), Residual(16, 16))
        self.head = nn.Linear(16, 2)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        features = self.layer2(self.layer1(self.stem(pixel_values)))
        logits = self.head(features.mean((2, 3)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def resnet() -> Given:
    return ResNet(), images(32)


FAMILIES = (llama, gpt2, bert, albert, t5, vit, mixtral, deepseek, gpt_oss, gemma, qwen, falcon, adapted, resnet)


def call(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
    return model(**batch)


def loss_of(batch: Any, output: Any) -> torch.Tensor:
    return output["loss"]


class Traced(NamedTuple):
    """A family's model in training mode, a batch and the profile."""

    model: nn.Module
    batch: dict[str, torch.Tensor]
    profile: ModelProfile


@cache
def traced(make: Callable[[], Given], device_type: str = "cpu") -> Traced:
    """One trace of a family for all checks of a process; none of them may change the model."""
    torch.manual_seed(0)
    model, batch = make()
    return Traced(model.train(), batch, trace(model, batch, call, loss_of, device_type=device_type))
