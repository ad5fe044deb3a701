"""Chunks that processes share: each may go its own way, is told where that is wrong, and no gradient is lost."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.auto.opt_lib.chunk.trace import trace_pass
from atorch.errors import ArgumentError, StrategyError
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


def loss_along(model: nn.Module, batch: tuple[Tensor, Way]) -> Tensor:
    return model(*batch).square().mean()


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return Blocks()


def rows_at(step: int, rank: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(rank: int, size: int, passes: list[tuple[Way, Way]], varies: bool = False) -> tuple[int, str, float]:
    """The number of passes, the error that stopped them, and the distance from plain training until there."""
    model, plain = blocks(), blocks()
    first = trace_pass(model, (rows_at(0, rank), passes[0][0]), loss_along, device_type="cpu")
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
            loss_along(model, (rows_at(step, rank), ways[rank])).backward()
        except StrategyError as error:
            said = str(error)
            break
        optim.step()
        optim.zero_grad()
        for each, way in enumerate(ways):
            (loss_along(plain, (rows_at(step, each), way)) / size).backward()
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
    model = blocks()
    first = trace_pass(model, (rows_at(0, rank), ALL), loss_along, device_type="cpu")._replace(varies=True)
    chunk(model, first, 2**20, device=CPU, group=dist.group.WORLD)

    def run_twice() -> None:
        for _ in range(2):
            loss_along(model, (rows_at(0, rank), ALL)).backward()
            if rank == 0:
                with torch.no_grad():
                    loss_along(model, (rows_at(0, rank), ALL))

    with pytest.raises(StrategyError, match="rank 0 begins a forward pass without gradients; rank 1 begins a pass"):
        run_twice()


class Branching(nn.Module):
    """Takes its last layer only when it is told to, and may raise in backward."""

    takes_all = raises = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, batch: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers[: None if self.takes_all else -1]):
            batch = torch.tanh(layer(batch))
            if self.raises and number == 0:  # the layers after it have their gradients by then
                batch.register_hook(_raise)
        return batch


def _raise(gradient: Tensor) -> None:
    raise ValueError("stumbled in backward")


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().sum()


def batch_of(rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))


def made() -> Branching:
    torch.manual_seed(0)
    return Branching()


@pytest.mark.parametrize("stumbles", [False, True])
@on_ranks()
def test_after_what_nobody_foresaw_all_gradients_are_reduced(rank: int, size: int, stumbles: bool) -> None:
    model, plain = made(), made()
    first = trace_pass(model, batch_of(rank), loss_of, device_type="cpu")
    operations = chunk(model, first, 10**6, device=torch.device("cpu"), group=dist.group.WORLD)
    if stumbles:
        model.raises = True
        try:
            loss_of(model, batch_of(rank)).backward()
        except ValueError:
            model.raises = False
    model.takes_all = plain.takes_all = not stumbles  # what takes nothing waits for the end of backward
    loss_of(model, batch_of(rank)).backward()
    for each in range(size):
        (loss_of(plain, batch_of(each)) / size).backward()
    found = []
    for name, parameter in plain.named_parameters():
        place = operations.chunks.place(model.get_parameter(name))
        assert place is not None
        memory, slot = place
        part, wanted = memory.gradient_of(slot), parameter.grad
        if wanted is None:
            assert slot.name not in memory.has_gradient
            continue
        held = memory.within(slot)
        distance = 0.0 if part is None else (part.flatten() - wanted.flatten()[held]).abs().max().item()
        found.append((distance, slot.name in memory.has_gradient))
    assert all(distance < 1e-6 and has for distance, has in found)


@on_ranks()
def test_a_gradient_that_no_process_has_reduced_is_refused(rank: int, size: int) -> None:
    model, plain = made(), made()
    first = trace_pass(model, batch_of(rank), loss_of, device_type="cpu")
    operations = chunk(model, first, 10**6, device=torch.device("cpu"), group=dist.group.WORLD)
    optim = ChunkOptimizer(torch.optim.SGD, model.parameters(), operations.chunks)
    weight = model.layers[0].weight
    loss_of(model, batch_of(rank)).backward()
    for each in range(size):
        (loss_of(plain, batch_of(each)) / size).backward()
    mine, edited = weight.grad, 2 * plain.layers[0].weight.grad
    optim.zero_grad()
    if mine is not None:
        weight.grad = 2 * mine
        place = operations.chunks.place(weight)
        edited = edited if mine.shape == weight.shape else edited.flatten()[place[0].within(place[1])]
        edited = (weight.grad.as_subclass(Tensor) - edited).abs().max()  # which refuses numbers otherwise
    optim.step()
    loss_of(model, batch_of(rank)).backward()
    optim.zero_grad()  # a pass that is thrown away
    (gradient,) = torch.autograd.grad(loss_of(model, batch_of(rank)), [weight])
    with pytest.raises(ArgumentError) as error:
        weight.grad = gradient
    assert str(error.value).startswith("layers.0.weight.grad was assigned, and no backward pass has reduced")
    assert (float(edited.max()) if mine is not None else 0.0) <= 1e-6
