"""What is used by hand, without a strategy, is told on all ranks where they call it differently."""

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from atorch.auto.opt_lib.chunk.trace import trace_pass
from atorch.errors import ArgumentError
from atorch.runtime.chunk.chunked import chunk
from atorch.runtime.data_parallel.zero1 import ShardedOptimizer
from atorch.runtime.fsdp.groups import FsdpUnit
from atorch.runtime.fsdp.shard import shard
from atorch.runtime.tensor_parallel import tensor_parallel
from tests.auto.test_arguments import Told, soon, told_by
from tests.auto.training import run_each
from tests.pool import Pool, on_ranks

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self, width: int = 4, hooked: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, 2)
        if hooked:
            self.second.weight.register_hook(lambda grad: grad)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def sgd(rate: float) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda groups: torch.optim.SGD(groups, lr=rate)


def stumbling(*_: Any) -> Any:
    raise ValueError("stumbled")


def optimizer(case: str, other: bool) -> Any:
    model = Net(8 if other and case == "model" else 4)
    params = list(model.parameters())
    make = sgd(0.2 if other and case == "learning rate" else 0.1)
    return ShardedOptimizer(
        params[::-1] if other and case == "order" else params,
        stumbling if other and case == "raises" else make,
        dist.group.WORLD,  # type: ignore[arg-type]
    )


def shards(case: str, other: bool) -> Any:
    model = Net(8 if other and case == "model" else 4, hooked=other and case == "raises")
    groups = [] if other and case == "groups" else [FsdpUnit((model.first,))]
    shape, names = ((2, 2), ("data", "zero")) if case == "hybrid" else ((dist.get_world_size(),), ("zero",))
    options: dict[str, Any] = {"reshard_after_forward": False} if other and case in ("keyword", "hybrid") else {}
    return shard(model, init_device_mesh("cpu", shape, mesh_dim_names=names), groups, **options)


def chunks(case: str, other: bool) -> Any:
    model, batch = Net(8 if other and case == "model" else 4), torch.zeros(3, 4)
    known = trace_pass(model, batch, lambda model, batch: model(batch).sum(), device_type="cpu")
    budget = {"keyword": 10**5, "raises": 10}.get(case, 10**6) if other else 10**6
    return chunk(model, known, budget, device=CPU, group=dist.group.WORLD)


def tensors(case: str, other: bool) -> Any:
    model = Net(8 if other and case == "model" else 4)
    run = stumbling if other and case == "raises" else lambda model: model(torch.ones(2, 4))
    options: dict[str, Any] = {"loss_parallel": False} if other and case == "keyword" else {}
    return tensor_parallel(model, run, init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",)), **options)


DOORS = {"optimizer": optimizer, "shards": shards, "chunks": chunks, "tensors": tensors}


def knock(rank: int, size: int, door: str, case: str) -> Told:
    """How a rank is refused; the last one calls otherwise. A user's own error stays what it is where it was raised."""

    def call() -> None:
        try:
            DOORS[door](case, rank == size - 1)
        except ValueError as error:
            raise ArgumentError(f"rank 1 failed: ValueError: {error}") from error

    torch.manual_seed(0)
    return told_by(call)


DIFFERENCES = {
    ("optimizer", "learning rate"): r"the optimizer's group 0\['lr'\] is 0.1 on rank 0 and 0.2 on rank 1",
    ("optimizer", "order"): r"parameter 0 of the optimizer is \(4, 4\) .* on rank 0 and \(2,\) .* on rank 1",
    ("optimizer", "model"): r"parameter 0 of the optimizer is \(4, 4\) .* on rank 0 and \(8, 4\) .* on rank 1",
    ("optimizer", "raises"): "rank 1 failed: ValueError: stumbled",
    ("shards", "model"): r"parameter 0 of the model is 'first.weight' \(4, 4\) .* and .* \(8, 4\) .* on rank 1",
    ("shards", "keyword"): "reshard_after_forward is None on rank 0 and False on rank 1",
    ("shards", "groups"): r"groups\[0\].* is 'first' on rank 0 and not given on rank 1",
    ("shards", "raises"): "second.weight has a hook on its gradient",
    ("shards", "hybrid"): "reshard_after_forward is None on rank .* and False on rank 3",
    ("chunks", "model"): r"chunk 0\S* is .* on rank 0 and .* on rank 1",
    ("chunks", "keyword"): "budget_bytes is 1000000 on rank 0 and 100000 on rank 1",
    ("chunks", "raises"): "budget",
    ("tensors", "model"): r"parameter 0 of the model is 'first.weight' \(4, 4\) .* and .* \(8, 4\) .* on rank 1",
    ("tensors", "keyword"): "loss_parallel is True on rank 0 and False on rank 1",
    ("tensors", "raises"): "rank 1 failed: ValueError: stumbled",
}


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_difference_is_told_on_all_ranks(pool: Pool, ranks: int) -> None:
    cases = {case: told for case, told in DIFFERENCES.items() if (case[1] == "hybrid") == (ranks == 4)}
    for of_case, pattern in zip(run_each(pool, knock, cases, ranks=ranks), cases.values(), strict=True):
        assert all(re.search(pattern, told) for told in soon(of_case)), (pattern, of_case)


@on_ranks(timeout=30)
def test_who_does_not_come_is_told_when_the_time_is_up(rank: int, size: int) -> None:
    """Rank 0 calls alone, in a group that waits a second."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        params = list(Net().parameters())
        told, _, _ = told_by(lambda: ShardedOptimizer(params, sgd(0.1), group))
        assert "ShardedOptimizer got no answer from the other processes" in told
    dist.barrier()


def part_of_the_world(rank: int, size: int) -> Told:
    """Ranks 1 and 2 of three, with other learning rates."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return "not asked", 0.0, 0.0
    return told_by(lambda: ShardedOptimizer(Net().parameters(), sgd(0.1 * rank), group))


def test_ranks_of_a_group_have_the_worlds_names(pool: Pool) -> None:
    first, *others = pool.run(part_of_the_world, ranks=3, timeout=20)
    assert first[0] == "not asked"
    assert all("is 0.1 on rank 1 and 0.2 on rank 2" in told for told in soon(others))
