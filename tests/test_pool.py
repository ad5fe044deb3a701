"""The pool itself: results by rank, failures with their tracebacks, survival after both."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, RankFailure, on_ranks


def summed(rank: int, size: int, factor: int) -> float:
    value = torch.tensor(float(rank * factor))
    dist.all_reduce(value)
    return value.item()


def one_raises(rank: int, size: int) -> None:
    if rank == 1:
        raise ValueError("rank one gave up")
    dist.barrier()


def one_dies(rank: int, size: int) -> None:
    if rank == 0:
        os._exit(3)
    dist.barrier()


def test_results_come_by_rank(pool: Pool) -> None:
    assert pool.run(summed, 10, ranks=2) == [10.0, 10.0]


@pytest.mark.parametrize(("function", "sign"), [(one_raises, "rank one gave up"), (one_dies, "exit code 3")])
def test_a_failing_rank_fails_the_call_and_the_pool_goes_on(pool: Pool, function: object, sign: str) -> None:
    with pytest.raises(RankFailure, match=sign):
        pool.run(function, ranks=2)  # type: ignore[arg-type]
    assert pool.run(summed, 1, ranks=2) == [1.0, 1.0]


@pytest.mark.parametrize("factor", [1, 3])
@on_ranks(3)
def test_a_body_runs_on_each_rank(rank: int, size: int, factor: int) -> None:
    assert summed(rank, size, factor) == 3.0 * factor


@on_ranks()
def raises_on_one(rank: int, size: int) -> None:
    assert rank == 0


def test_a_body_that_fails_on_a_rank_fails(pool: Pool) -> None:
    with pytest.raises(RankFailure, match="rank 1 of 2"):
        raises_on_one(pool)  # type: ignore[call-arg, arg-type]
