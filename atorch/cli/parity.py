"""One process of `atorch test`: trains a small model sharded and plain, and compares the two.

Every step uses every sample, each process its own share of them, so the order of the data does not matter. The
comparison is of the update: ‖Δp − Δp_ref‖ / ‖Δp_ref‖ over all parameters together, after a few steps of SGD in fp32.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.utils.data import TensorDataset

from atorch.auto import auto_accelerate

NUM_SAMPLES, NUM_FEATURES, NUM_STEPS = 16, 32, 4
LEARNING_RATE = 0.1
TOLERANCE = 1e-4


def main() -> int:
    """Compare on this process, and return the exit status; the first process prints the outcome."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(NUM_FEATURES, 64), nn.Tanh(), nn.Linear(64, 1))
    samples = TensorDataset(torch.randn(NUM_SAMPLES, NUM_FEATURES), torch.randn(NUM_SAMPLES, 1))
    start, reference = _flat(model.parameters()), copy.deepcopy(model)

    train_plain(reference, samples)
    sharded = train_sharded(model, samples)

    update, expected = _flat(sharded.parameters()) - start, _flat(reference.parameters()) - start
    difference = float((update - expected).norm() / expected.norm())
    is_same = difference <= TOLERANCE  # False for NaN
    if dist.get_rank() == 0:
        verdict = "ok" if is_same else f"wrong, more than {TOLERANCE:.0e}"
        typer.echo(f"{dist.get_world_size()} processes against one: updates differ by {difference:.1e}, {verdict}")
    dist.barrier()  # a process that fails ends the others, so the verdict is printed before any does
    dist.destroy_process_group()
    return 0 if is_same else 1


def train_plain(model: nn.Module, samples: TensorDataset) -> None:
    optim = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    batch = samples[:]
    for _ in range(NUM_STEPS):
        optim.zero_grad()
        loss_of(batch, model(batch[0])).backward()
        optim.step()


def train_sharded(model: nn.Module, samples: TensorDataset) -> nn.Module:
    _, result, _ = auto_accelerate(
        model,
        optim_func=torch.optim.SGD,
        optim_args={"lr": LEARNING_RATE},
        dataset=samples,
        dataloader_args={"batch_size": NUM_SAMPLES},
        loss_func=loss_of,
        load_strategy=["parallel_mode", "fsdp"],
    )
    assert result is not None  # only a search returns none
    device = next(result.model.parameters()).device
    for _ in range(NUM_STEPS):
        for batch in result.dataloader:
            batch = result.prepare_input(batch, device)
            result.loss_func(batch, result.model(batch[0])).backward()
            result.optim.step()
            result.optim.zero_grad()
    return result.model


def loss_of(batch: Any, output: torch.Tensor) -> torch.Tensor:
    """Mean squared error of `output` (batch, 1) to the batch's targets."""
    return nn.functional.mse_loss(output, batch[1])


def _flat(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """All full parameters, on the host, in one vector of float64."""
    from torch.distributed.tensor import DTensor

    whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in parameters)
    return torch.cat([p.detach().double().cpu().flatten() for p in whole])


if __name__ == "__main__":
    sys.exit(main())
