"""Alone a process needs no peer: collectives return at once, with results of the right sizes; tensors have parts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from atorch.distributed.collectives import all_gather_single, reduce_scatter_single
from atorch.distributed.local_collectives import are_collectives_local, local_collectives
from atorch.model.pytree import dense_parts, is_dense, same_values
from tests.pool import on_ranks


def gathered(mine: Tensor) -> list[Tensor]:
    parts = [torch.full((2, 3), torch.nan) for _ in range(2)]
    dist.all_gather(parts, mine)
    return parts


def gathered_as_one(mine: Tensor) -> Tensor:
    whole = torch.full((4, 3), torch.nan)
    all_gather_single(whole, mine, async_op=True).wait()
    return whole


def scattered(mine: Tensor) -> Tensor:
    part = torch.full((1, 3), torch.nan)
    reduce_scatter_single(part, mine)
    return part


def exchanged(mine: Tensor) -> Tensor:
    given = torch.full((2, 3), torch.nan)
    dist.all_to_all_single(given, mine)
    return given


def received(mine: Tensor) -> Tensor:
    given, other = torch.full((2, 3), torch.nan), 1 - dist.get_rank()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, given, other)]):
        work.wait()
    return given


def reduced(mine: Tensor) -> Tensor:
    dist.all_reduce(mine)
    dist.broadcast(mine, 0)
    dist.barrier()
    return mine


def redistributed(mine: Tensor) -> list[Tensor]:
    whole = functional.all_gather_tensor(mine, 0, dist.group.WORLD)
    part = functional.reduce_scatter_tensor(mine, "sum", 0, dist.group.WORLD)
    total = functional.all_reduce(mine, "sum", dist.group.WORLD)
    swapped = functional.all_to_all_single(mine, [1, 1], [1, 1], dist.group.WORLD)
    return [each * 1.0 for each in (whole, part, total, swapped)]


CALLS: tuple[Callable[[Tensor], Any], ...] = (
    gathered, gathered_as_one, scattered, exchanged, received, reduced, redistributed,
)  # fmt: skip


def shapes(made: Any) -> list[tuple[int, ...]]:
    return [tuple(each.shape) for each in (made if isinstance(made, list) else [made])]


def finite(made: Any) -> bool:
    return all(bool(each.isfinite().all()) for each in (made if isinstance(made, list) else [made]))


@on_ranks(2, timeout=30)
def test_a_process_alone_gets_what_has_the_sizes_that_all_get(rank: int, size: int) -> None:
    alone = []
    if rank == 0:
        with local_collectives():
            alone = [call(torch.ones(2, 3)) for call in CALLS]
    together = [shapes(call(torch.ones(2, 3))) for call in CALLS]
    assert rank or list(map(shapes, alone)) == together
    assert all(map(finite, alone))


@on_ranks(2, timeout=30)
def test_what_parts_of_tensors_do_is_alone_too(rank: int, size: int) -> None:
    mesh, told = init_device_mesh("cpu", (size,)), []
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    if rank == 0:
        with local_collectives():
            made = weight.redistribute(mesh, [Replicate()]).to_local()
            made.register_hook(lambda _: told.append(are_collectives_local()))
            made.sum().backward()
        assert (made.shape, weight.grad.to_local().shape) == ((4, 4), (2, 4))
        assert told == [True]
    dist.barrier()
    assert not are_collectives_local()


def test_where_nobody_else_is_nothing_changes() -> None:
    with local_collectives():
        assert not are_collectives_local()


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda values: values,
    "coo": torch.Tensor.to_sparse,
    "csr": torch.Tensor.to_sparse_csr,
    "csc": torch.Tensor.to_sparse_csc,
    "strided rows": lambda values: torch.nested.nested_tensor([values, values[:1]]),
    "jagged rows": lambda values: torch.nested.nested_tensor([values, values[:1]], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore:.*(beta state|prototype)")
@pytest.mark.parametrize("kind", KINDS)
def test_parts_hold_the_values(kind: str) -> None:
    tensor, other = KINDS[kind](torch.eye(3)), KINDS[kind](2 * torch.eye(3))
    assert not same_values(tensor, other)
    for part, values in zip(dense_parts(tensor), dense_parts(other), strict=True):
        part.copy_(values)
    assert same_values(tensor, other)
    assert same_values(tensor, tensor.clone())
    assert is_dense(tensor) == (kind == "plain")
