"""Processes that share chunks under a tight budget, and take ways of their own through the model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.auto.opt_lib.chunk.trace import foreseen
from atorch.errors import StrategyError
from atorch.runtime.chunk.chunk_optimizer import ChunkOptimizer
from atorch.runtime.chunk.chunked import chunk
from tests.pool import on_ranks

WIDTH, CPU = 8, torch.device("cpu")
Way = Sequence[int]
ALL: Way = (0, 1, 2, 3, 4)

# What each of two processes runs, pass by pass; how many passes are right, and what the error names then.
WAYS: dict[str, tuple[list[tuple[Way, Way]], int, str]] = {
    "both as foreseen": ([(ALL, ALL)] * 3, 3, ""),
    "both skip blocks": ([(ALL, ALL), ((0, 2, 4), (0, 2, 4)), (ALL, ALL)], 3, ""),
    "both run some again": ([(ALL, ALL), ((0, 1, 0, 4, 3), (0, 1, 0, 4, 3)), (ALL, ALL)], 3, ""),
    "one skips a block": ([(ALL, ALL), (ALL, (0, 1, 3, 4))], 1, "blocks.2"),
    "one skips the last block": ([(ALL, ALL), (ALL, (0, 1, 2, 3))], 1, "blocks.4"),
    "branches": ([(ALL, ALL), ((0, 1, 3), (0, 1, 4))], 1, "blocks.4"),
    "branches that are both there": ([(ALL, ALL), ((0, 1, 2), (0, 1, 3))], 2, ""),
    "branches from the first pass on": ([((0, 1, 2), (0, 1, 3))], 0, "blocks.2"),
    "another order": ([(ALL, ALL), (ALL, (0, 2, 1, 3, 4))], 1, "blocks.2"),
    "one goes around more often": ([(ALL, ALL), (ALL, (0, 1, 0, 1, 2, 3, 4))], 1, "blocks.0"),
}


class Blocks(nn.Module):
    """Blocks that run in an order which the caller gives."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in ALL)

    def forward(self, x: Tensor, way: Way) -> Tensor:
        for number in way:
            x = x + torch.tanh(self.blocks[number](x))
        return x


def loss_of(model: nn.Module, batch: tuple[Tensor, Way]) -> Tensor:
    loss: Tensor = model(*batch).square().mean()
    return loss


def made() -> nn.Module:
    torch.manual_seed(0)
    return Blocks()


def batch_of(step: int, rank: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(rank: int, size: int, passes: list[tuple[Way, Way]], varies: bool = False) -> tuple[int, str, float]:
    """How many passes were run, what stopped them, and how far parameters are from plain training until there."""
    model, plain = made(), made()
    first = foreseen(model, (batch_of(0, rank), passes[0][0]), loss_of, device_type="cpu")
    first = first._replace(varies=varies)
    others = max(each.other_bytes for each in first.accesses)
    budget = others + 4 * 4 * WIDTH * WIDTH  # two blocks, beside their gradients
    group = dist.group.WORLD
    operations = chunk(model, first, budget, device=CPU, group=group, chunk_size=WIDTH * WIDTH)
    optim = ChunkOptimizer(lambda groups: torch.optim.SGD(groups, lr=0.1), model.parameters(), operations.chunks)
    plain_optim = torch.optim.SGD(plain.parameters(), lr=0.1)
    done, said = 0, ""
    for step, ways in enumerate(passes):
        try:
            loss_of(model, (batch_of(step, rank), ways[rank])).backward()
        except StrategyError as error:
            said = str(error)
            break
        optim.step()
        optim.zero_grad()
        for each, way in enumerate(ways):
            (loss_of(plain, (batch_of(step, each), way)) / size).backward()
        plain_optim.step()
        plain_optim.zero_grad()
        done += 1
    values = model.state_dict()
    return done, said, max(float((values[name] - each).abs().max()) for name, each in plain.named_parameters())


@pytest.mark.parametrize("varies", [False, True])
@on_ranks()
def test_ways_of_their_own_are_right_or_told_on_all_processes_unless_they_are_known_to_vary(
    rank: int, size: int, varies: bool
) -> None:
    for case, (passes, right, name) in WAYS.items():
        done, said, distance = trained(rank, size, passes, varies)
        assert distance < 1e-6, case
        assert done == (len(passes) if varies else right), (case, said)
        assert bool(said) == (bool(name) and not varies), case
        assert not said or (name in said and "rank 0" in said and "rank 1" in said)


@on_ranks(timeout=60)
def test_a_pass_of_one_process_alone_is_told_on_all(rank: int, size: int) -> None:
    """The first process runs a pass without gradients that the others do not."""
    model = made()
    first = foreseen(model, (batch_of(0, rank), ALL), loss_of, device_type="cpu")._replace(varies=True)
    chunk(model, first, 2**20, device=CPU, group=dist.group.WORLD)

    def run_twice() -> None:
        for _ in range(2):
            loss_of(model, (batch_of(0, rank), ALL)).backward()
            if rank == 0:
                with torch.no_grad():
                    loss_of(model, (batch_of(0, rank), ALL))

    with pytest.raises(StrategyError, match="rank 0 begins a forward pass without gradients; rank 1 begins a pass"):
        run_twice()
