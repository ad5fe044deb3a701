"""Streams that say how they are divided: each rank reads its own part alone, and all have as many batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset, get_worker_info

from atorch.errors import ArgumentError
from atorch.runtime.data.loader import Loader, StreamShard, make_loader
from tests.auto.training import accelerate
from tests.pool import Pool, on_ranks


class Shards(IterableDataset[Any]):
    """Lists of numbers, as files are, which workers share out; notes what was read."""

    def __init__(self, shards: Sequence[Sequence[int]], broken: int | None = None) -> None:
        self.shards, self.broken, self.epoch = shards, broken, 0
        self.read: list[int] = []

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    def shard(self, num_shards: int, index: int) -> Shards:
        part = Shards(self.shards[index::num_shards], self.broken)
        part.read = self.read
        return part

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        mine = self.shards if worker is None else self.shards[worker.id :: worker.num_workers]
        for number in (number + 1000 * self.epoch for shard in mine for number in shard):
            if number == self.broken:
                raise ValueError("this file is cut off")
            self.read.append(number)
            yield number


class Samples(Shards):
    """The same as inputs of a model."""

    def shard(self, num_shards: int, index: int) -> Samples:
        return Samples(self.shards[index::num_shards])

    def __iter__(self) -> Iterator[Any]:
        for number in super().__iter__():
            yield torch.tensor([number / 10, 1.0])


def uneven() -> list[list[int]]:
    """Of four shards two are longer: of two ranks one has 13 samples and the other 10."""
    return [list(range(7)), list(range(10, 15)), list(range(20, 26)), list(range(30, 35))]


def in_a_group(loader: Loader) -> Loader:
    loader.group = dist.group.WORLD
    return loader


def test_a_rank_reads_its_own_part_alone_and_one_process_the_stream_as_it_is() -> None:
    whole = Shards(uneven())
    first = [batch.tolist() for batch in make_loader(whole, {"batch_size": 4}, 0, 2)]
    assert first == [[0, 1], [2, 3], [4, 5], [6, 20], [21, 22], [23, 24]], "and the 25th is left: batches are full"
    assert whole.read == [*range(7), *range(20, 26)]
    assert make_loader(whole, {"batch_size": 4}, 0, 1).dataset is whole
    loader = make_loader(Shards(uneven()), {"batch_size": 4}, 1, 2)
    loader.set_epoch(1)
    assert next(iter(loader)).tolist() == [1010, 1011]


class Named(Shards):
    """Its shards are of another kind."""

    num_shards = None  # type: ignore[assignment]


class Lists(Shards):
    """Its parts are no streams."""

    def shard(self, num_shards: int, index: int) -> Any:
        return self.shards[index]


def test_shards_of_another_number_or_kind_are_read_by_all(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(make_loader(Shards(uneven()), {"batch_size": 3}, 0, 3).dataset, StreamShard)
    assert "4 shards, which do not divide over 3 processes" in caplog.text
    assert isinstance(make_loader(Named(uneven()), {"batch_size": 2}, 0, 2).dataset, StreamShard)


def test_what_was_divided_already_or_gives_no_stream_is_refused() -> None:
    part = Shards(uneven())
    part._distributed = (1, 2)  # type: ignore[attr-defined]  # as datasets.distributed.split_dataset_by_node leaves it
    with pytest.raises(ArgumentError, match="divided already, by split_dataset_by_node"):
        make_loader(part, {"batch_size": 2}, 1, 2)
    with pytest.raises(ArgumentError, match=r"Lists.shard\(num_shards=2, index=0\) returned .*; it returns an Iter"):
        make_loader(Lists(uneven()), {"batch_size": 2}, 0, 2)


def numbers(loader: Loader) -> list[int]:
    return [int(number) for batch in loader for number in batch]


@on_ranks()
def test_all_ranks_have_as_many_batches_and_one_that_cannot_read_or_has_none_stops_all(rank: int, size: int) -> None:
    loader = in_a_group(make_loader(Shards(uneven()), {"batch_size": 2 * size}, rank, size))
    for _ in range(2):
        found: list[list[int]] = [[]] * size
        dist.all_gather_object(found, numbers(loader))
        assert [len(each) for each in found] == [10, 10]
        assert len(set(sum(found, []))) == 20
        assert set(sum(found, [])) <= set(sum(uneven(), []))
    loader = in_a_group(make_loader(Shards(uneven(), broken=12), {"batch_size": 2 * size}, rank, size))
    told = ("another process failed to read its part of the stream; its own error says why", "this file is cut off")
    with pytest.raises((ArgumentError, ValueError), match=f"^{told[rank]}$"):
        train_on(loader)
    loader = in_a_group(make_loader(Shards([[1, 2, 3], [4]]), {"batch_size": 2 * size}, rank, size))
    with pytest.raises(ArgumentError, match="has no full batch in its part of the stream"):
        list(loader)


def test_workers_share_out_the_part_of_their_rank() -> None:
    parts = [numbers(make_loader(Shards(uneven()), {"batch_size": 4, "num_workers": 2}, rank, 2)) for rank in range(2)]
    assert sorted(parts[0]) == [*range(6), *range(20, 26)], "each worker leaves what fills no batch"
    assert sorted(parts[1]) == [*range(10, 14), *range(30, 34)]


def train_on(loader: Loader) -> None:
    for batch in loader:
        dist.all_reduce(batch, group=dist.group.WORLD)  # a step, in which all must be


def trained(rank: int, size: int) -> tuple[list[list[int]], list[Tensor]]:
    """The numbers that this rank saw, step by step; the parameters afterwards."""
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    loss_func = lambda batch, output: output.square().mean()  # noqa: E731
    result, seen = accelerate(model, ["ddp"], Samples(uneven()), loss_func, batch_size=2 * size), []
    for batch in result.dataloader:
        seen.append([round(float(x[0]) * 10) for x in batch])
        result.step(batch)
    return seen, [each.detach().clone() for each in result.model.parameters()]


def test_processes_train_on_batches_of_their_own_until_one_has_no_more(pool: Pool) -> None:
    (first, weights), (second, others) = pool.run(trained)
    assert len(first) == len(second) == 5, "until the rank with 10 samples has no more"
    assert sorted(sum(first, [])) == [*range(7), *range(20, 23)]
    assert sorted(sum(second, [])) == [*range(10, 15), *range(30, 35)]
    assert all(map(torch.equal, weights, others))
