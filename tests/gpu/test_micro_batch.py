"""Sizes of micro-batches are tried alone where autograd has threads of its own, and where NCCL would wait forever."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from atorch.distributed.local_collectives import are_collectives_local, local_collectives
from atorch.runtime.fsdp.groups import FsdpUnit
from atorch.runtime.fsdp.shard import shard
from atorch.runtime.gradients.micro_batched import MicroBatched
from tests.pool import Pool
from tests.runtime.memory.test_micro_batch import Tight, mse, tight_batch

pytestmark = pytest.mark.gpu


def of_backward(rank: int, size: int) -> list[bool]:
    """Where a hook of backward believes to be, on autograd's thread for the device; nobody waits for rank 0."""
    told, sent = [], torch.ones(4, device="cuda", requires_grad=True)

    def hook(gradient: Tensor) -> None:
        told.append(are_collectives_local())
        dist.all_reduce(gradient.clone())

    if rank == 0:
        with local_collectives():
            product = sent * 2
            product.register_hook(hook)
            product.sum().backward()
    dist.barrier()
    return told


def test_backward_passes_are_alone_too(pool: Pool) -> None:
    assert pool.run(of_backward, timeout=60) == [[True], []]


class Full(Tight):
    """Asks the device for more than any has."""

    def run_out(self, *_: Tensor) -> None:
        torch.empty(2**50, dtype=torch.uint8, device="cuda")


def finds_a_size(rank: int, size: int, where: str) -> tuple[list[Tensor], list[int]]:
    torch.cuda.set_device(rank)
    mesh = DeviceMesh.from_group(dist.new_group(backend="nccl"), "cuda")
    model = Full(3 if rank == 1 else 99, where).cuda()
    shard(model, mesh, [FsdpUnit((block,)) for block in model.blocks])
    loss_func = MicroBatched(model, mse, loss_weight="rows")
    optim = torch.optim.Adam(model.parameters(), lr=0.01)
    batch = {name: each.cuda() for name, each in tight_batch(rank).items()}
    for _ in range(3):
        model.seen.clear()
        loss_func(batch, model(batch["x"])).backward()
        optim.step()
        optim.zero_grad()
    return [p.full_tensor().detach().cpu() for p in model.parameters()], model.seen


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL takes a device a process")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_over_nccl_one_that_runs_out_of_memory_leaves_no_other_waiting(pool: Pool, where: str) -> None:
    plain = Tight()
    optim = torch.optim.Adam(plain.parameters(), lr=0.01)
    for _ in range(3):
        (sum(mse(tight_batch(rank), plain(tight_batch(rank)["x"])) for rank in (0, 1)) / 2).backward()
        optim.step()
        optim.zero_grad()
    for weights, seen in pool.run(finds_a_size, where, timeout=60):
        assert seen == [2, 2, 2, 2]
        for mine, expected in zip(weights, plain.parameters(), strict=True):
            torch.testing.assert_close(mine, expected.detach(), rtol=1e-4, atol=1e-6)
