"""What is used by hand, without a strategy, is told on all ranks where they call it differently."""

import re
from collections.abc import Callable, Mapping
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


def net(width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))


def stumbling(*_: Any) -> Any:
    raise ValueError("stumbled")


def optimizer(rate: float = 0.1, model: Any = None, make: Any = None, group: Any = None) -> Any:
    make = make or (lambda groups: torch.optim.SGD(groups, lr=rate))
    return ShardedOptimizer(list((model or net()).parameters()), make, group or dist.group.WORLD)


def shards(axes: Mapping[str, int], hooked: bool = False, in_groups: bool = True, **options: Any) -> Any:
    model = net()
    if hooked:
        model[2].weight.register_hook(lambda grad: grad)
    groups = [FsdpUnit((model[0],))] if in_groups else []
    return shard(model, init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes)), groups, **options)


def chunks(budget: int) -> Any:
    model = net()
    known = trace_pass(model, torch.zeros(3, 4), lambda model, batch: model(batch).sum(), device_type="cpu")
    return chunk(model, known, budget, device=torch.device("cpu"), group=dist.group.WORLD)


def tensors(model: Any = None, run: Any = lambda model: model(torch.ones(2, 4)), **options: Any) -> Any:
    return tensor_parallel(model or net(), run, init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",)), **options)


ONE, HYBRID = {"zero": 2}, {"data": 2, "zero": 2}
RESHARDS = "reshard_after_forward is None on rank .* and False on rank"
CASES: Mapping[str, tuple[str, Callable[[bool], Any]]] = {
    "rate": (r"group 0\['lr'\] is 0.1 on rank 0 and 0.2 on rank 1", lambda other: optimizer(0.2 if other else 0.1)),
    "optimizer's model": (r"is \(4, 4\) .* on rank 0 and \(8, 4\)", lambda other: optimizer(model=net(4 + 4 * other))),
    "optimizer raises": ("ValueError: stumbled", lambda other: optimizer(make=stumbling if other else None)),
    "shards": (RESHARDS, lambda other: shards(ONE, **({"reshard_after_forward": False} if other else {}))),
    "groups": (r"groups\[0\].* is '0' on rank 0 and not given", lambda other: shards(ONE, in_groups=not other)),
    "hook": ("2.weight has a hook on its gradient", lambda other: shards(ONE, hooked=other)),
    "budget": ("budget_bytes is 1000000 on rank 0 and 100000", lambda other: chunks(10**5 if other else 10**6)),
    "too small a budget": ("budget", lambda other: chunks(10 if other else 10**6)),
    "rows' model": (r"'0.weight' \(4, 4\) .* and .* \(8, 4\)", lambda other: tensors(net(4 + 4 * other))),
    "rows": ("loss_parallel is True on rank 0", lambda other: tensors(**({"loss_parallel": False} if other else {}))),
    "rows raise": ("ValueError: stumbled", lambda other: tensors(**({"run": stumbling} if other else {}))),
    "hybrid": (f"{RESHARDS} 3", lambda other: shards(HYBRID, **({"reshard_after_forward": False} if other else {}))),
}
"""The error, and a call, in which the last rank is the other one."""


def knock(rank: int, size: int, case: str) -> Told:
    """How a rank is refused. A user's own error stays what it is where it was raised."""

    def call() -> None:
        try:
            CASES[case][1](rank == size - 1)
        except ValueError as error:
            raise ArgumentError(f"rank 1 failed: ValueError: {error}") from error

    torch.manual_seed(0)
    return told_by(call)


@pytest.mark.parametrize(("ranks", "cases"), [(2, [case for case in CASES if case != "hybrid"]), (4, ["hybrid"])])
def test_a_difference_is_told_on_all_ranks(pool: Pool, ranks: int, cases: list[str]) -> None:
    for case, of_ranks in zip(cases, run_each(pool, knock, [(case,) for case in cases], ranks=ranks), strict=True):
        assert all(re.search(CASES[case][0], told) for told in soon(of_ranks)), (case, of_ranks)


@on_ranks(timeout=30)
def test_who_does_not_come_is_told_when_the_time_is_up(rank: int, size: int) -> None:
    """Rank 0 calls alone, in a group that waits a second."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        told, _, _ = told_by(lambda: optimizer(group=group))
        assert "ShardedOptimizer got no answer from the other processes" in told
    dist.barrier()


@on_ranks(3, timeout=20)
def test_ranks_of_a_group_have_the_worlds_names(rank: int, size: int) -> None:
    group = dist.new_group([1, 2])
    if rank:
        told, _, _ = told_by(lambda: optimizer(0.1 * rank, group=group))
        assert "is 0.1 on rank 1 and 0.2 on rank 2" in told
