"""A training step under `load_strategy` against the same step written by hand in torch.

A step is zero_grad, forward, loss, backward, optimizer, on a batch in memory. All variants run in one process (or one
pair of processes), interleaved in a shuffled order; the hand-written step runs twice, and the ratio of the two is the
noise floor. Accelerate and Lightning Fabric run in the same rounds.

    python benchmarks/step_overhead.py [--quick]
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from command import answer_of, as_rank, main
from compare import Row, interleave

from atorch import auto_accelerate

Step = Callable[[], object]
OTHERS = ("hand again", "accelerate", "fabric")


def make_model(width: int) -> nn.Module:
    """A residual MLP, with two blocks at small widths, where a step takes about a millisecond, else with four."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(width, width), *(Block(width) for _ in range(2 if width <= 32 else 4)), nn.Linear(width, width)
    )


class Block(nn.Module):
    """Norm, up, GELU, down, residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def loss_func(batch: Any, output: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, batch)


def make_batch(width: int) -> torch.Tensor:
    return torch.randn(4 if width <= 32 else 128, width, generator=torch.Generator().manual_seed(1))


def by_hand(width: int, kind: str) -> Step:
    """The step as one writes it in torch."""
    model, batch = make_model(width), make_batch(width)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in list(model)[1:-1]:  # type: ignore[call-overload]
            fully_shard(block)
        fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-4)
    autocast = (lambda: torch.autocast("cpu", torch.bfloat16)) if kind == "amp" else contextlib.nullcontext

    def step() -> None:
        with autocast():
            loss = loss_func(batch, model(batch))
        loss.backward()
        optim.step()
        optim.zero_grad()

    return step


STRATEGIES: dict[str, list[Any]] = {
    "plain": [],
    "amp": [("amp_native", "bf16")],
    "ddp": ["parallel_mode", "ddp"],
    "fsdp": ["parallel_mode", ("fsdp", {"atorch_wrap_cls": ("Block",)})],
}


def by_atorch(width: int, kind: str) -> Step:
    """The documented loop's step under a strategy."""
    _, result, _ = auto_accelerate(
        make_model(width),
        torch.optim.AdamW,
        loss_func=loss_func,
        optim_args={"lr": 1e-4},
        load_strategy=STRATEGIES[kind],
    )
    assert result is not None
    model, optim, _, loss, _, _ = result
    batch = make_batch(width)

    def step() -> None:
        value = loss(batch, model(batch))
        value.backward()
        optim.step()
        optim.zero_grad()

    return step


def by_accelerate(width: int, kind: str) -> Step:
    """The same step with Hugging Face Accelerate."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # a process can have only one precision at a time
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if kind == "amp" else "no")
    model = make_model(width)
    prepared, optim = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    batch = make_batch(width)

    def step() -> None:
        with accelerator.autocast():
            loss = loss_func(batch, prepared(batch))
        accelerator.backward(loss)
        optim.step()
        optim.zero_grad()

    return step


def by_fabric(width: int, kind: str) -> Step:
    """The same step with Lightning Fabric."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed" if kind == "amp" else "32-true")
    model = make_model(width)
    prepared, optim = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    batch = make_batch(width)

    def step() -> None:
        loss = loss_func(batch, prepared(batch))
        fabric.backward(loss)
        optim.step()
        optim.zero_grad()

    return step


def in_one_process(kind: str, width: int, rounds: int) -> list[Row]:
    """One process: ours, by hand twice, and the peers."""
    samples = interleave(
        {
            "hand": by_hand(width, kind),
            "hand again": by_hand(width, kind),
            "atorch": by_atorch(width, kind),
            "accelerate": by_accelerate(width, kind),
            "fabric": by_fabric(width, kind),
        },
        rounds,
    )
    title = f"{kind}, width {width} ({samples.median_ms('hand'):.2f} ms a step by hand)"
    if width <= 32:
        cost = {name: samples.difference_us(name, "hand") for name in samples.seconds if name != "hand"}
        ours = cost["atorch"].value
        below = ours < min(cost["accelerate"].value, cost["fabric"].value)
        bar = "≤ 50 and below both peers"
        rows = [Row(f"{title}: atorch − hand, µs", f"{cost['atorch']:.1f}", bar, ours <= 50 and below)]
        return rows + [Row(f"{title}: {name} − hand, µs", f"{cost[name]:.1f}", "") for name in OTHERS]
    ratios = {name: samples.ratio(name, "hand") for name in samples.seconds if name != "hand"}
    rows = [Row(f"{title}: atorch / hand", f"{ratios['atorch']:.3f}", "≤ 1.01", ratios["atorch"].value <= 1.01)]
    return rows + [Row(f"{title}: {name} / hand", f"{ratios[name]:.3f}", "") for name in OTHERS]


def in_process(kind: str, width: int, rounds: int) -> list[tuple[Any, ...]] | None:
    """Two processes in one group: ours and by hand twice."""
    rank = as_rank()
    samples = interleave(
        {
            "hand": by_hand(width, kind),
            "hand again": by_hand(width, kind),
            "atorch": by_atorch(width, kind),
        },
        rounds,
    )
    if rank != 0:
        return None
    ours, null = samples.ratio("atorch", "hand"), samples.ratio("hand again", "hand")
    title = f"{kind} on 2 processes, width {width} ({samples.median_ms('hand'):.1f} ms a step by hand)"
    return [
        (f"{title}: atorch / hand", f"{ours:.3f}", "≤ 1.01", ours.value <= 1.01),
        (f"{title}: hand again / hand", f"{null:.3f}", "", None),
    ]


def measure(quick: bool = False) -> list[Row]:
    torch.set_num_threads(1)
    few, many = (60, 200) if quick else (400, 1600)
    rows = [row for kind in ("plain", "amp") for row in in_one_process(kind, 32, many)]
    rows += [row for kind in ("plain", "amp") for row in in_one_process(kind, 256, few)]
    rows += [Row(*row) for kind in ("ddp", "fsdp") for row in answer_of(__file__, kind, 256, few)]
    return rows


if __name__ == "__main__":
    main(measure, in_process=in_process)
