"""A training script that outlives its processes: it resumes where it was, saves on a signal, and names who died.

torchrun --nproc-per-node 2 --max-restarts 3 examples/launch/train.py --folder run
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from atorch import RunMonitor, auto_accelerate, resume_or_start, save_checkpoint


class Net(nn.Module):
    """A small network; its batch is a list of inputs and targets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: list[torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = self.layers(batch[0])
        return output


def train(folder: str, steps: int, signals: Collection[int] = (signal.SIGTERM, signal.SIGUSR1)) -> bool:
    """Train until `steps` or a signal; return True if nothing is left to do."""
    torch.manual_seed(0)
    inputs = torch.randn(1000, 16)
    _, result, _ = auto_accelerate(
        Net(),
        torch.optim.AdamW,
        TensorDataset(inputs, inputs.sin().sum(1, keepdim=True)),
        lambda batch, output: nn.functional.mse_loss(output, batch[1]),
        dataloader_args={"batch_size": 8, "shuffle": True, "drop_last": True},  # of all processes: any number may go on
        load_strategy=["fsdp"],
    )
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    step = resume_or_start(folder, result)
    with RunMonitor(signals) as monitor:
        while step < steps:
            result.dataloader.set_epoch(step // len(result.dataloader))
            for batch in result.dataloader:
                loss = result.step(batch)
                if size > 1:
                    dist.all_reduce(loss)
                step += 1
                if rank == 0:
                    print(f"step {step} on {size}: loss {float(loss) / size:.6f}", flush=True)
                is_stopping = monitor.should_stop()
                if is_stopping or step == steps or step % 100 == 0:
                    save_checkpoint(folder, result, step, keep_last=2)
                if is_stopping or step == steps:
                    return step == steps
    return True


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", default="run")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--status", type=int, default=0, help="of the process that stopped on a signal")
    given = parser.parse_args()
    sys.exit(0 if train(given.folder, given.steps) else given.status)
