"""Cuts by time, within a GPU's memory where there is one; partition's own tests tell what it makes of figures."""

from dataclasses import replace

import torch
from torch import nn

from atorch.auto.job import make_context
from atorch.auto.opt_lib.parallel_mode import ParallelMode
from atorch.auto.opt_lib.pipeline_parallel import PipelineParallel, even_cut, tied_calls
from atorch.auto.strategy import Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.distributed.local_collectives import fake_world

WIDTH = 64


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.into(x).relu())


class Chain(nn.Module):
    """Blocks of the given widths."""

    def __init__(self, *hidden: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(each) for each in hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def cut(model: nn.Module, cluster: str = "2x1xA100-80GB", memory_bytes: float | None = None) -> tuple[int, ...]:
    """The first block of each of two stages, on a GPU with so much memory."""
    with fake_world(2, 0) as world:
        spec = ClusterSpec.load(cluster)
        if memory_bytes is not None:
            spec = replace(spec, device=replace(spec.device, memory_bytes=memory_bytes))
        ctx = make_context(
            model, torch.optim.AdamW, loss_func=lambda batch, output: output.mean(), world=world, cluster=spec
        )
        mode, method = ParallelMode(slices=(("pipeline", 2),)), PipelineParallel(micro_batches=2)
        ctx = replace(mode.apply(ctx), strategy=Strategy((mode, method)))
        ctx = replace(ctx, world=replace(world, device=torch.device("cuda")))  # which is looked at, and nothing more
        called = [f"blocks.{index}" for index in range(len(model.blocks))]
        return even_cut(ctx, method, model, called, torch.randn(1 << 16, WIDTH), 2)


def test_cuts_are_for_time_and_within_memory():
    assert cut(Chain(4096, 256, 256, 256)) == (0, 1)
    assert cut(Chain(256, 256, 256, 4096)) == (0, 3)

    # The first stage holds activations of two micro-batches, the second of one: by time alone each has two blocks.
    model = Chain(4096, 4096, 4096, 4096)
    assert cut(model) == (0, 2)
    assert cut(model, memory_bytes=2e9) == (0, 1)

    model = Chain(16, 16, 16)
    model.blocks[2].out.bias = model.blocks[0].out.bias
    assert list(tied_calls(model, ["blocks.0", "blocks.1", "blocks.2", "blocks.1"])) == [(0, 2), (1, 3)]


def test_what_fits_nowhere_is_cut_for_time(caplog):
    assert cut(Chain(4096, 256, 256, 256), memory_bytes=1e6) == (0, 1)
    assert "cut for time alone" in caplog.text
