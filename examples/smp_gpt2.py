"""Train a GPT-2 by a script for SageMaker model parallel, of which the import alone has changed.

    torchrun --nproc-per-node 4 examples/smp_gpt2.py
    torchrun --nproc-per-node 4 examples/smp_gpt2.py --steps 60 --resume

A pipeline of two, with two replicas. The model is cut automatically at the first step, and saved at the end. The second
command goes on from there; it may have another number of processes, and then the checkpoint is put together anew.
"""

from __future__ import annotations

import argparse
from itertools import islice
from typing import Any

import stdlib_code
import torch
from console import console_of
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel

import atorch.smp as smp  # was: import smdistributed.modelparallel.torch as smp


@smp.step
def train_step(model: Any, input_ids: Tensor) -> Tensor:
    """Forward and backward of one micro-batch, on a model that is split over processes."""
    loss = model(input_ids, labels=input_ids).loss
    model.backward(loss)
    return loss


@smp.step
def eval_step(model: Any, input_ids: Tensor) -> Tensor:
    """Forward of one micro-batch."""
    return model(input_ids, labels=input_ids).loss


def held_out_loss(model: Any, loader: Any) -> float:
    """The mean loss over some batches that no process trains on."""
    model.eval()
    with torch.no_grad():
        losses = [eval_step(model, batch["input_ids"]).reduce_mean() for batch in islice(loader, 4)]
    model.train()
    return float(sum(losses) / len(losses))


def main() -> None:
    """Train from the start, or from where an earlier run ended."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40, help="up to which one, counted from the first run's first")
    parser.add_argument("--batch-size", type=int, default=16, help="of each replica")
    parser.add_argument("--seq", type=int, default=64, help="bytes in a sample")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--stages", type=int, default=2, help="of the pipeline")
    parser.add_argument("--folder", default="smp_checkpoints", help="of checkpoints")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint of the folder")
    args = parser.parse_args()

    smp.init({"pipeline_parallel_degree": args.stages, "microbatches": 4, "ddp": True})
    console = console_of(smp.rank())
    torch.manual_seed(0)
    training, held_out = stdlib_code.load(args.seq)
    sampler = DistributedSampler(training, smp.dp_size(), smp.dp_rank())
    loader = DataLoader(training, args.batch_size, sampler=sampler, drop_last=True)
    evaluation = DataLoader(held_out, args.batch_size, drop_last=True)

    shape = {"n_layer": args.layers, "n_embd": args.width, "n_head": args.width // 32, "n_positions": args.seq}
    tokens = {"vocab_size": stdlib_code.NUM_BYTES, "bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}
    model = smp.DistributedModel(GPT2LMHeadModel(GPT2Config(**shape, **tokens, use_cache=False)))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))
    first = smp.resume_from_checkpoint(args.folder)["steps"] if args.resume else 0

    before = held_out_loss(model, evaluation)  # the first step cuts the model and loads the checkpoint
    console.print(f"{smp.size()} processes, {smp.dp_size()} replicas in {smp.pp_size()} stages, from step {first}:")
    console.print(str(model.division))
    for step, batch in enumerate(islice(loader, first, args.steps), first):
        optimizer.zero_grad()
        loss = train_step(model, batch["input_ids"]).reduce_mean()
        optimizer.step()
        if step % 10 == 9:
            console.print(f"step {step + 1}: loss {loss:.2f}")
    after = held_out_loss(model, evaluation)
    console.print(f"Loss on code that was held out: {before:.2f} → {after:.2f}")

    content = {"steps": args.steps}
    smp.save_checkpoint(args.folder, f"step{args.steps}", model=model, optimizer=optimizer, user_content=content)
    console.print(f"Saved in {args.folder}; go on with --steps {args.steps + 20} --resume")
    smp.shutdown()


if __name__ == "__main__":
    main()
