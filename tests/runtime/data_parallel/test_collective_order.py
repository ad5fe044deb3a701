"""Ranks that take different ways through a sharded model are told so on all of them; those that agree train as ever."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from atorch.errors import StrategyError
from atorch.runtime.fsdp.groups import FsdpUnit
from atorch.runtime.fsdp.shard import shard
from tests.auto.training import run_each
from tests.pool import Pool, RankFailure, on_ranks
from tests.runtime.sharing import whole

WIDTH = 8
CAN_FIND = hasattr(FSDPModule, "set_reduce_scatter_unused_params")


class Branching(nn.Module):
    """Blocks that run in an order which the caller gives; a block has two branches."""

    def __init__(self, widths: Sequence[int] = (16, 16, 16)) -> None:
        super().__init__()
        self.begin = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Twofold(width) for width in widths)
        self.end = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, order: Sequence[int], branches: Sequence[int] = ()) -> Tensor:
        x = self.begin(x)
        for place, number in enumerate(order):
            x = self.blocks[number](x, branches[place] if branches else 2)
        return self.end(x)


class Twofold(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, WIDTH)) for _ in range(2)
        )

    def forward(self, x: Tensor, branch: int) -> Tensor:
        for number, each in enumerate(self.branches):
            if branch in (number, 2):
                x = x + each(x)
        return x


Way = tuple[Sequence[int], Sequence[int]]
ALL: Way = ((0, 1, 2), ())

# What each of two ranks does, step by step; the step that is refused, and what the error names.
DIFFERENT: dict[str, tuple[list[tuple[Way, Way]], Sequence[int], int, str]] = {
    "another block": ([(((0, 1), ()), ((0, 2), ()))], (16, 16, 16), 0, "blocks.1"),
    "a block of another size": ([(((0, 1), ()), ((0, 2), ()))], (16, 16, 24), 0, "blocks.2"),
    "the last block less": ([(ALL, ((0, 1), ()))], (16, 16, 16), 0, "blocks.2"),
    "no block at all": ([(ALL, ((), ()))], (16, 24, 16), 0, "blocks.0"),
    "later another block": (
        [(((0, 1), ()),) * 2, (((0, 2), ()),) * 2, (((0, 1), ()), ((0, 2), ()))],
        (16, 16, 16),
        2,
        "blocks.2",
    ),
    "later a new block": ([(((0, 1), ()),) * 2, (((0, 1), ()), ((0, 2), ()))], (16, 16, 24), 1, "blocks.2"),
    "later a block less": ([(ALL, ALL), (ALL, ALL), (ALL, ((0, 2), ()))], (16, 24, 16), 2, "blocks.1"),
    "another branch within a block": ([(((0,), (0,)), ((0,), (1,)))], (16, 16, 16), 0, "branches.1.0.weight"),
    "later another branch within": (
        [(ALL, ALL), (((0, 1, 2), (2, 0, 2)), ((0, 1, 2), (2, 1, 2)))],
        (16,) * 3,
        1,
        "1.branches.1",
    ),
    "half a block": ([(((0,), (2,)), ((0,), (1,)))], (16, 16, 16), 0, "gradients of blocks.0"),
}


def data(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, WIDTH, generator=generator), torch.randn(4, 1, generator=generator)


def sharded(size: int, widths: Sequence[int], keep: bool, finds_unused: bool) -> nn.Module:
    torch.manual_seed(0)
    model = Branching(widths)
    shape, names = ((2, 2), ("data", "zero")) if size == 4 else ((size,), ("data",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    shard(
        model,
        mesh,
        [FsdpUnit((block,)) for block in model.blocks],
        reshard_after_forward=False if keep else None,
        find_unused_parameters=finds_unused,
    )
    return model


def refused_at(
    rank: int, size: int, steps: list[tuple[Way, Way]], widths: Sequence[int], keep: bool, finds_unused: bool
) -> tuple[int, str, bool]:
    """The step that was refused, the message, and whether parameters had changed since the step before."""
    model = sharded(size, widths, keep, finds_unused)
    parameters = [parameter.detach().to_local() for parameter in model.parameters()]  # type: ignore[attr-defined]
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, ways in enumerate(steps):
        before = [parameter.clone() for parameter in parameters]
        x, y = data(rank, number)
        try:
            loss = F.mse_loss(model(x, *ways[rank % 2]), y)
            dist.all_reduce(torch.ones(7))  # as a loss that counts the labels of all ranks
            loss.backward()
        except StrategyError as error:
            changed = any(not torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
            return number, str(error), changed
        optim.step()
        optim.zero_grad()
    return -1, "", False


@pytest.mark.parametrize(("keep", "finds_unused", "ranks"), [(False, False, 2), (True, CAN_FIND, 2), (False, False, 4)])
def test_ranks_that_take_different_ways_are_told(pool: Pool, keep: bool, finds_unused: bool, ranks: int) -> None:
    names = [case for case in DIFFERENT if not (finds_unused and ("within" in case or case == "half a block"))]
    names = names if ranks == 2 else ["later a new block", "another branch within a block"]
    cases = [(*DIFFERENT[case][:2], keep, finds_unused) for case in names]
    for case, of_ranks in zip(names, run_each(pool, refused_at, cases, ranks=ranks), strict=True):
        _, _, step, name = DIFFERENT[case]
        for refused, message, changed in of_ranks:
            assert (refused, changed) == (step, False), case
            assert all(sign in message for sign in (name, "rank 0", "rank 1")), (case, message)


def plainly(model: Branching, ways: list[tuple[Way, Way]], ranks: Sequence[int]) -> list[Tensor | None]:
    """Plain training on what all ranks see, in one process."""
    optim = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for number, way in enumerate(ways):
        optim.zero_grad()
        for rank in ranks:
            x, y = data(rank, number)
            (F.mse_loss(model(x, *way[rank % 2]), y) / len(ranks)).backward()
        optim.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def trained(
    rank: int, size: int, ways: list[tuple[Way, Way]], keep: bool, finds_unused: bool
) -> tuple[float, list[bool]]:
    model = sharded(size, (16, 16, 24), keep, finds_unused)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    has_gradient = []
    for number, way in enumerate(ways):
        optim.zero_grad()
        x, y = data(rank, number)
        F.mse_loss(model(x, *way[rank]), y).backward()
        has_gradient = [parameter.grad is not None for parameter in model.parameters()]
        optim.step()
        with torch.no_grad():
            model(x, *way[rank])
    torch.manual_seed(0)
    plain = Branching((16, 16, 24))
    expected = plainly(plain, ways, range(size))
    difference = max(
        float((whole(mine) - theirs).abs().max()) for mine, theirs in zip(model.parameters(), expected, strict=True)
    )
    assert has_gradient == [parameter.grad is not None for parameter in plain.parameters()]
    return difference, has_gradient


ALIKE: list[list[tuple[Way, Way]]] = [
    [(ALL, ALL), (((0, 2), ()),) * 2, (ALL, ALL), (((2, 1, 0), ()),) * 2, (((0, 0, 1), ()),) * 2, (ALL, ALL)],
    [(((0, 1), (0, 2)),) * 2, (((0, 1), (0, 2)),) * 2, (ALL, ALL), (((0, 1), (1, 2)),) * 2, (ALL, ALL)],
]


@pytest.mark.parametrize(("keep", "finds_unused"), [(False, False), (True, CAN_FIND)])
@on_ranks()
def test_what_all_ranks_do_alike_trains_as_one_process_does(
    rank: int, size: int, keep: bool, finds_unused: bool
) -> None:
    assert max(trained(rank, size, ways, keep, finds_unused)[0] for ways in ALIKE) <= 1e-5


WITHIN: list[tuple[Way, Way]] = [
    (((0, 1), (0, 2)), ((0, 1), (1, 2))),
    (((0, 1), (0, 2)), ((0, 1), (0, 2))),
    (ALL, ALL),
    (((0, 1, 2), (2, 0, 1)), ((0, 1, 2), (1, 0, 2))),
]


@pytest.mark.skipif(CAN_FIND, reason="torch's FSDP2 can")
def test_unused_parameters_that_torch_leaves_out_are_not_looked_for(pool: Pool) -> None:
    with pytest.raises(RankFailure, match="find_unused_parameters=True is not supported by the FSDP2 of torch"):
        pool.run(trained, WITHIN, False, True)


@pytest.mark.skipif(not CAN_FIND, reason="torch's FSDP2 leaves unused parameters out")
def test_unused_parameters_of_a_group_may_differ_where_they_are_looked_for(pool: Pool) -> None:
    for difference, has_gradient in pool.run(trained, WITHIN, False, True):
        assert difference <= 1e-5
        assert any(has_gradient)


@on_ranks()
def test_a_pass_like_the_last_one_is_compared_twice(rank: int, size: int) -> None:
    from atorch.runtime.data_parallel import collective_order

    model, counts = sharded(size, (16, 16, 16), False, False), []
    inner: Callable[..., object] = collective_order.dist.all_reduce
    calls = 0

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        return inner(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective_order.dist, "all_reduce", counted)
        for step in range(4):
            x, y = data(rank, step)
            before = calls
            F.mse_loss(model(x, *ALL), y).backward()
            counts.append(calls - before)
    first, second, third, fourth = counts
    assert first > 5
    assert second <= 3
    assert (third, fourth) == (2, 2)  # before the loss, and at the end of backward
