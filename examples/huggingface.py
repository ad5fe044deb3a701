"""The usual loop for a model of `transformers`, with atorch in it: the README shows the lines that changed.

    python examples/huggingface.py                                # or
    torchrun --nproc-per-node 2 examples/huggingface.py

The optimizer, with its groups, and the loader are the script's own; atorch makes others like them for its strategy.
"""

from __future__ import annotations

import argparse

import stdlib_code
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

from atorch import auto_accelerate, clip_grad_norm

SEQ, STEPS = 64, 40


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch whose labels are its tokens, as `DataCollatorForLanguageModeling` makes it."""
    tokens = torch.stack([sample["input_ids"] for sample in samples])
    return {"input_ids": tokens, "labels": tokens}


parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--steps", type=int, default=STEPS)
steps = parser.parse_args().steps

torch.manual_seed(0)
dataset, _ = stdlib_code.load(SEQ)
config = GPT2Config(vocab_size=stdlib_code.NUM_BYTES, n_embd=64, n_layer=2, n_head=2, n_positions=SEQ, use_cache=False)
model = GPT2LMHeadModel(config)
groups = [
    {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
    {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=3e-3)
loader = DataLoader(dataset, batch_size=16, shuffle=True, collate_fn=collate, drop_last=True)
_, result, strategy = auto_accelerate(
    model, optimizer, loader, lambda _, output: output.loss, model_input_format="unpack_dict", load_strategy=["fsdp"]
)
model, optimizer, loader = result.model, result.optim, result.dataloader
device = next(model.parameters()).device
scheduler = get_linear_schedule_with_warmup(optimizer, 10, steps)

losses = []
for _, batch in zip(range(steps), loader, strict=False):
    batch = result.prepare_input(batch, device)
    loss = result.loss_func(batch, model(**batch))
    loss.backward()
    clip_grad_norm(model, 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"Loss on batches: {losses[0]:.2f} → {losses[-1]:.2f}")
