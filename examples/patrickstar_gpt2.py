"""Train a GPT2 in fp16 by PatrickStar's loop, within a budget of device memory, and record where its memory goes.

    python examples/patrickstar_gpt2.py
    torchrun --nproc-per-node 2 examples/patrickstar_gpt2.py
    atorch visualize profile.json --fig-type memory
    atorch visualize profile.json --fig-type access

fp16 is slow on a CPU: expect a second a step there.
"""

from __future__ import annotations

import argparse
from itertools import islice

import stdlib_code
import torch
from console import console_of
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel

from atorch.distributed import init
from atorch.errors import OutOfBudgetError
from atorch.patrickstar.profiler import profiler
from atorch.patrickstar.runtime import initialize_engine
from atorch.units import format_bytes


def main() -> None:
    """Train a few steps between the profiler's start and end."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=2, help="of each process")
    parser.add_argument("--seq", type=int, default=32, help="bytes in a sample")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--budget-mib", type=float, default=24, help="MiB of device memory")
    parser.add_argument("--profile", default="profile.json", help="where rank 0 writes what was recorded")
    args = parser.parse_args()

    world = init()
    console = console_of(world.rank)
    torch.manual_seed(0)
    training, _ = stdlib_code.load(args.seq)
    sampler = DistributedSampler(training, world.size, world.rank)
    loader = DataLoader(training, args.batch_size, sampler=sampler, drop_last=True)

    def model_func() -> nn.Module:
        shape = {"n_layer": args.layers, "n_embd": args.width, "n_head": args.width // 64, "n_positions": args.seq}
        tokens = {"vocab_size": stdlib_code.NUM_BYTES, "bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(**shape, **tokens, use_cache=False))

    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12},
        "gradient_clipping": 1.0,
        "client": {"mem_tracer": {"gpu_memory_bytes": int(args.budget_mib * 2**20), "overall_gpu_mem_ratio": 1.0}},
    }
    profiler.start()
    model, optimizer = initialize_engine(model_func=model_func, local_rank=world.local_rank, config=config)
    try:
        for step, batch in enumerate(islice(loader, args.steps)):
            optimizer.zero_grad()
            loss = model(batch["input_ids"], labels=batch["input_ids"]).loss
            model.backward(loss)
            optimizer.step()
            console.print(f"step {step}: loss {loss.item():.2f}")
    except OutOfBudgetError as error:
        raise SystemExit(str(error)) from None
    profiler.end()
    most = max(event.total_bytes for event in profiler.recorded().memory if event.tier == "GPU")
    console.print(f"At most {format_bytes(most)} of {format_bytes(model.client.budget_bytes)} were in use.")
    if world.rank == 0:
        profiler.save(args.profile)


if __name__ == "__main__":
    main()
