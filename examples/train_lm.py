"""Train a small Llama on the source of Python's standard library, byte by byte, fully automatic.

    torchrun --nproc-per-node 2 examples/train_lm.py
    torchrun --nproc-per-node 2 examples/train_lm.py --strategy strategy.json     # reuses what was found

The same script runs on one process, without torchrun, and on GPUs.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator
from typing import Any

import stdlib_code
import torch
from console import Progress, console_of
from rich.panel import Panel
from rich.syntax import Syntax
from torch import nn
from torch.utils.data import DataLoader, Subset
from transformers import LlamaConfig, LlamaForCausalLM

from atorch import auto_accelerate
from atorch.distributed import init


def make_model(seq: int) -> nn.Module:
    """A Llama of 1.7 million parameters with random weights."""
    config = LlamaConfig(
        vocab_size=stdlib_code.NUM_BYTES,
        hidden_size=256,
        intermediate_size=672,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=seq,
        initializer_range=0.06,  # 1 / sqrt(256): transformers' 0.02 is meant for larger models, and learns slower here
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def loss_func(batch: dict[str, torch.Tensor], output: Any) -> torch.Tensor:
    """Mean cross-entropy of the next byte, in nats."""
    logits, targets = output.logits[:, :-1], batch["input_ids"][:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def schedule(step: int, num_steps: int) -> float:
    """The share of the learning rate: up over the first tenth of the steps, then down along a cosine."""
    warm_up = max(1, num_steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 + 0.5 * math.cos(math.pi * (step - warm_up) / (num_steps - warm_up + 1))


def batches(loader: Any, num: int) -> Iterator[Any]:
    """`num` batches of the loader, in a new order each epoch."""
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        for batch in loader:
            if num == 0:
                return
            yield batch
            num -= 1


@torch.no_grad()
def evaluate(result: Any, data: stdlib_code.Windows, device: torch.device, num: int = 64) -> float:
    """The mean loss on `num` windows spread over `data`; every process reads all, which works under any strategy."""
    result.model.eval()
    spread = Subset(data, range(0, len(data), max(1, len(data) // num)))
    losses = []
    for batch in DataLoader(spread, batch_size=8, drop_last=True):
        batch = result.prepare_input(batch, device)
        losses.append(result.loss_func(batch, result.model(**batch)).item())
    result.model.train()
    return sum(losses) / len(losses)


@torch.no_grad()
def sample(model: nn.Module, prompt: bytes, length: int, seq: int, device: torch.device) -> str:
    """`prompt` continued by the model to `length` bytes in all; all processes call this together."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    text = torch.zeros(1, seq, dtype=torch.long, device=device)
    text[0, : len(prompt)] = torch.tensor(list(prompt))
    for end in range(len(prompt), min(length, seq)):
        logits = model(input_ids=text).logits[0, end - 1].float().cpu()
        text[0, end] = torch.multinomial((logits / 0.7).softmax(0), 1, generator=generator)
    model.train()
    return bytes(text[0, :length].tolist()).decode(errors="replace").replace("\0", "")


def search_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments to load a strategy file, or to search and save the strategy."""
    if args.strategy:
        return {"load_strategy": args.strategy}
    return {"save_strategy_to_file": args.out, "time_limit": args.time_limit}


def main() -> None:
    """Plan, train, evaluate, and keep the strategy."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=16, help="of all processes together")
    parser.add_argument("--seq", type=int, default=256, help="bytes in a sample")
    parser.add_argument("--strategy", help="a strategy file: no search")
    parser.add_argument("--time-limit", type=float, default=60, help="seconds for the search")
    parser.add_argument("--out", default="strategy.json", help="where to save the strategy that was found")
    args = parser.parse_args()

    world = init()
    console = console_of(world.rank)
    torch.manual_seed(0)
    training, held_out = stdlib_code.load(args.seq)
    model = make_model(args.seq)
    num_params, num_bytes = sum(p.numel() for p in model.parameters()), len(training) * args.seq
    console.print(f"A Llama of {num_params / 1e6:.1f} M parameters reads {num_bytes / 1e6:.1f} MB of Python's library.")

    status, result, strategy = auto_accelerate(
        model,
        torch.optim.AdamW,
        training,
        loss_func,
        model_input_format="unpack_dict",
        optim_args={"lr": 2e-3, "betas": (0.9, 0.95)},
        dataloader_args={"batch_size": args.batch_size, "shuffle": True, "drop_last": True},
        lr_scheduler_cls=torch.optim.lr_scheduler.LambdaLR,
        lr_scheduler_args={"lr_lambda": lambda step: schedule(step, args.steps)},
        **search_arguments(args),
    )
    if not status:
        raise SystemExit("no strategy fits this machine")
    if args.strategy:
        console.print(f"No search: {strategy}", soft_wrap=True)

    with console.status("Evaluating"):
        before = evaluate(result, held_out, world.device)
    with Progress(console, args.steps, args.batch_size * args.seq, "bytes") as progress:
        for batch in batches(result.dataloader, args.steps):
            batch = result.prepare_input(batch, world.device)
            loss = result.loss_func(batch, result.model(**batch))
            loss.backward()
            result.optim.step()
            result.optim.zero_grad()
            result.lr_scheduler.step()
            progress.advance(loss)
    with console.status("Evaluating, and writing a sample"):
        after = evaluate(result, held_out, world.device)
        text = sample(result.model, b"class ", args.seq, args.seq, world.device)

    console.print(f"Loss on files it has not seen: {before:.2f} → {after:.2f} ({after / math.log(2):.2f} bits a byte)")
    console.print(Panel(Syntax(text, "python", background_color="default"), title="a sample of the model"))
    if not args.strategy:
        console.print(f"Saved {args.out}. To skip the search next time, add: --strategy {args.out}", soft_wrap=True)


if __name__ == "__main__":
    main()
