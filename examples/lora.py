"""Adapt a language model with LoRA, its own weights frozen and sharded: peft's model goes in, peft's adapter comes out.

    python examples/lora.py
    torchrun --nproc-per-node 2 examples/lora.py

Nothing is downloaded, so the base model first learns some Python here; yours comes from `from_pretrained`. The adapter
then teaches it the prose of Python's reference manual, which is in the standard library too.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics
from typing import Any

import stdlib_code
import torch
from console import Progress, console_of
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from atorch import auto_accelerate
from atorch.distributed import init

SEQ = 128
STRATEGY = [
    "parallel_mode",
    ("fsdp", {"wrap_trainable_outmost": True}),  # the few trainable weights are reduced together
    ("amp_native", "bf16"),
    "checkpoint",
]


def make_base() -> LlamaForCausalLM:
    """A Llama of 0.9 million parameters with random weights."""
    config = LlamaConfig(
        vocab_size=stdlib_code.NUM_BYTES,
        hidden_size=128,
        intermediate_size=336,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=SEQ,
        initializer_range=0.06,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def loss_func(batch: dict[str, torch.Tensor], output: Any) -> torch.Tensor:
    """Mean cross-entropy of the next byte, in nats."""
    logits, targets = output.logits[:, :-1], batch["input_ids"][:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def pretrain(model: nn.Module, steps: int) -> None:
    """Train shortly on source code in plain PyTorch, the same on every process, in place of a download."""
    code, _ = stdlib_code.load(SEQ)
    optim = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(code, batch_size=8, shuffle=True)
    for _, batch in zip(range(steps), loader, strict=False):
        loss_func(batch, model(**batch)).backward()
        optim.step()
        optim.zero_grad()


@torch.no_grad()
def evaluate(model: nn.Module, data: stdlib_code.Windows, device: torch.device) -> float:
    """The mean loss on `data`; all processes call this together."""
    batch = {"input_ids": data.windows.long().to(device)}
    return loss_func(batch, model(**batch)).item()


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter on the host, gathered from all processes if it is sharded."""
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().cpu()


def main() -> None:
    """Adapt a base model, and save the adapter alone."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base-steps", type=int, default=100)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=16, help="of all processes together")
    parser.add_argument("--out", default="out/adapter", help="where to save the adapter")
    args = parser.parse_args()

    world = init()
    console = console_of(world.rank)
    torch.manual_seed(0)
    text = "\n".join(topics.values()).encode()
    training, held_out = stdlib_code.Windows(text[16_384:], SEQ), stdlib_code.Windows(text[:16_384], SEQ)

    console.print("The base model learns some Python …")
    base = make_base()
    pretrain(base, args.base_steps)
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    _, result, strategy = auto_accelerate(
        get_peft_model(base, config),
        torch.optim.AdamW,
        training,
        loss_func,
        model_input_format="unpack_dict",
        optim_args={"lr": 5e-3},
        optim_param_func=lambda model: [p for p in model.parameters() if p.requires_grad],
        dataloader_args={"batch_size": args.batch_size, "shuffle": True, "drop_last": True},
        load_strategy=STRATEGY,
    )
    trainable, frozen = (
        sum(p.numel() for p in result.model.parameters() if p.requires_grad == wanted) for wanted in (True, False)
    )
    console.print(f"Strategy: {strategy}\n{trainable:,} parameters are trained, {frozen:,} are frozen.", soft_wrap=True)

    before = evaluate(result.model, held_out, world.device)
    with Progress(console, args.steps, args.batch_size * SEQ, "bytes") as progress:
        for _, batch in zip(range(args.steps), result.dataloader, strict=False):
            batch = result.prepare_input(batch, world.device)
            loss = result.loss_func(batch, result.model(**batch))
            loss.backward()
            result.optim.step()
            result.optim.zero_grad()
            progress.advance(loss)
    after = evaluate(result.model, held_out, world.device)
    console.print(f"Loss on prose it has not seen: {before:.2f} → {after:.2f}")

    adapter = {name: whole(p) for name, p in result.model.named_parameters() if p.requires_grad}
    if world.rank == 0:
        result.model.save_pretrained(args.out, state_dict=adapter)
    console.print(f"Saved {args.out}. To use it: PeftModel.from_pretrained(base, {args.out!r})", soft_wrap=True)


if __name__ == "__main__":
    main()
