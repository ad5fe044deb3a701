"""Host memory is counted before it is taken, and what does not fit is refused on all processes."""

import resource
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest
import torch

from atorch.distributed.host_memory import free_on_node, free_to_process, missing_bytes, need_host_memory
from atorch.errors import OutOfBudgetError
from atorch.runtime.chunk import chunked
from tests.auto.training import refusal, run_each
from tests.foreign.script import Samples, accelerated
from tests.pool import Pool, on_ranks

MiB = 2**20


class Wide(torch.nn.Module):
    """Parameters in fp32; by default 4 MiB in two blocks."""

    def __init__(self, width: int = 724, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def row(width: int, index: int) -> torch.Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(index))


def job(width: int = 724, blocks: int = 2) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "model": Wide(width, blocks),
        "optim_func": torch.optim.AdamW,
        "dataset": Samples(16, partial(row, width)),
        "loss_func": lambda batch, output: output.square().mean(),
        "dataloader_args": {"batch_size": 4},
    }


def free(num_bytes: int) -> Any:
    return mock.patch.object(psutil, "virtual_memory", return_value=SimpleNamespace(available=num_bytes, total=2**40))


def trained(strategy: Any, *shape: int) -> float:
    training = accelerated(job(*shape), strategy)
    for batch in training.dataloader:
        loss = training.loss_func(batch, training.model(batch))
        loss.backward()
        training.optim.step()
        training.optim.zero_grad()
    return float(loss)


def with_free(rank: int, size: int, strategy: Any, free_bytes: int, *shape: int) -> float:
    with free(free_bytes):
        return trained(strategy, *shape)


CHUNK = ("chunk", {"budget_bytes": 24 * MiB, "hybrid": False})
CASES: list[tuple[Any, int, int, int]] = [
    ([CHUNK], 1, 8 * MiB, 16 * MiB),
    ([CHUNK], 2, 6 * MiB, 14 * MiB),
    (["ddp", "offload"], 2, 20 * MiB, 40 * MiB),
    ([("fsdp", {"cpu_offload": True})], 2, 6 * MiB, 40 * MiB),
]
"""Strategy, processes, too few bytes, and enough: 4 MiB of parameters take 16 with gradients and AdamW's states."""


@pytest.mark.parametrize("processes", [1, 2])
def test_what_does_not_fit_is_refused_on_all_processes(pool: Pool, processes: int) -> None:
    cases = [(strategy, few, enough) for strategy, ranks, few, enough in CASES if ranks == processes]
    for told in run_each(pool, refusal, [(with_free, strategy, few) for strategy, few, _ in cases], ranks=processes):
        assert all("a node is short of" in message for message in told), told
    run_each(pool, with_free, [(strategy, enough) for strategy, _, enough in cases], ranks=processes)


@on_ranks(1)
def test_gradients_take_the_place_of_parameters_where_that_fits(rank: int, size: int) -> None:
    """States that do not fit beside 16-bit parameters, which a warning says."""
    strategy = [("half", "bf16"), CHUNK]
    beside = with_free(rank, size, strategy, 2**40)
    with mock.patch.object(chunked.logger, "warning") as warned:
        assert with_free(rank, size, strategy, 14 * MiB) == beside
    assert any("take the place of parameters" in call.args[0] for call in warned.call_args_list)


@on_ranks(1)
def test_the_device_is_filled_where_the_host_is_short(rank: int, size: int) -> None:
    """Of 16 MiB, one of 16 blocks on the device costs the least traffic, and four have room there."""
    strategy = [("chunk", {"budget_bytes": 5 * MiB})]
    ample, short = (with_free(rank, size, strategy, free_bytes, 256, 16) for free_bytes in (2**40, 9 * MiB))
    assert ample == short


def test_limits_of_the_process_and_the_machine_count() -> None:
    assert 0 < free_on_node() <= psutil.virtual_memory().total
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = psutil.Process().memory_info().vms
    try:
        resource.setrlimit(resource.RLIMIT_AS, (used + 100 * MiB, before[1]))
        assert free_to_process() <= 100 * MiB
        assert missing_bytes(200 * MiB) >= 100 * MiB
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    with free(10 * MiB), pytest.raises(OutOfBudgetError, match="a table takes 11 MiB .*10 MiB .*short of 1 MiB. Less"):
        need_host_memory(11 * MiB, "a table", "Less of it")
