"""Train a GPT2 whose parameters, gradients and optimizer states take four times the memory that it is given.

    python examples/chunk_offload.py
    torchrun --nproc-per-node 2 examples/chunk_offload.py
    torchrun --nproc-per-node 2 examples/chunk_offload.py --budget-mib 40

On a GPU the budget limits its memory. On a CPU, where device and host share one memory, it limits the model's buffers.
"""

from __future__ import annotations

import argparse
from typing import Any

import stdlib_code
import torch
from console import Progress, console_of
from torch import nn
from torch.utils.data import DataLoader, Subset
from transformers import GPT2Config, GPT2LMHeadModel

from atorch import auto_accelerate
from atorch.distributed import init
from atorch.errors import OutOfBudgetError
from atorch.units import format_bytes

STATE_BYTES = 16  # of a parameter in fp32: 4 its value, 4 its gradient, 8 Adam's two moments


def make_model(seq: int, layers: int, width: int) -> nn.Module:
    """A GPT2 with random weights."""
    config = GPT2Config(
        vocab_size=stdlib_code.NUM_BYTES,
        n_positions=seq,
        n_embd=width,
        n_layer=layers,
        n_head=width // 64,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def loss_func(batch: dict[str, torch.Tensor], output: Any) -> torch.Tensor:
    """Mean cross-entropy of the next byte, in nats."""
    logits, targets = output.logits[:, :-1], batch["input_ids"][:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def evaluate(result: Any, data: stdlib_code.Windows, device: torch.device, num: int = 16) -> float:
    """The mean loss on `num` windows spread over `data`; every process reads all of them."""
    result.model.eval()
    spread = Subset(data, range(0, len(data), max(1, len(data) // num)))
    losses = []
    for batch in DataLoader(spread, batch_size=4, drop_last=True):
        batch = result.prepare_input(batch, device)
        losses.append(result.loss_func(batch, result.model(**batch)).item())
    result.model.train()
    return sum(losses) / len(losses)


def main() -> None:
    """Train under a budget, and print the traffic of chunks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=4, help="of all processes together")
    parser.add_argument("--seq", type=int, default=128, help="bytes in a sample")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--budget-mib", type=float, help="MiB of device memory; a quarter of the states if not given")
    args = parser.parse_args()

    world = init()
    console = console_of(world.rank)
    torch.manual_seed(0)
    training, held_out = stdlib_code.load(args.seq)
    model = make_model(args.seq, args.layers, args.width)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    states = STATE_BYTES * num_params
    budget = states // 4 if args.budget_mib is None else int(args.budget_mib * 2**20)
    console.print(f"A GPT2 of {num_params / 1e6:.1f} M parameters has states of {format_bytes(states)}.")
    console.print(f"It may use {format_bytes(budget)}.")

    try:
        _, result, strategy = auto_accelerate(
            model,
            torch.optim.AdamW,
            training,
            loss_func,
            model_input_format="unpack_dict",
            optim_args={"lr": 5e-4},
            dataloader_args={"batch_size": args.batch_size, "shuffle": True, "drop_last": True},
            load_strategy=["checkpoint", ("chunk", {"budget_bytes": budget})],
        )
    except OutOfBudgetError as error:
        raise SystemExit(str(error)) from None
    moved = strategy.metadata["chunk"]
    console.print(
        f"{moved['num_chunks']} chunks; at most {format_bytes(moved['peak_bytes'])} on the device at once, and "
        f"{moved['fetched_bytes'] / moved['parameter_bytes']:.2f} × the parameters fetched for each batch"
    )

    before = evaluate(result, held_out, world.device)
    done = 0
    with Progress(console, args.steps, args.batch_size * args.seq, "bytes") as progress:
        while done < args.steps:
            for batch in result.dataloader:
                batch = result.prepare_input(batch, world.device)
                loss = result.loss_func(batch, result.model(**batch))
                loss.backward()
                result.optim.step()
                result.optim.zero_grad()
                progress.advance(loss)
                done += 1
                if done == args.steps:
                    break
    after = evaluate(result, held_out, world.device)
    console.print(f"Loss on files it has not seen: {before:.2f} → {after:.2f}")


if __name__ == "__main__":
    main()
