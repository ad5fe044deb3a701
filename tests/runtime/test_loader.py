"""Global batches are split over ranks: together the ranks see exactly what one process would."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler, WeightedRandomSampler

from atorch.errors import ArgumentError
from atorch.runtime.loader import make_loader, to_device

DATA = list(range(24))


def batches(arguments: dict[str, Any], size: int, epoch: int = 0, data: Any = DATA, **more: Any) -> list[list[int]]:
    """The global batches, each as the sorted union of what the ranks see."""
    loaders = [make_loader(data, arguments, rank, size, **more) for rank in range(size)]
    for loader in loaders:
        loader.set_epoch(epoch)
    return [sorted(int(i) for part in parts for i in part) for parts in zip(*loaders, strict=True)]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_together_see_the_single_process_batches(size: int, shuffle: bool) -> None:
    arguments = {"batch_size": 8, "shuffle": shuffle}
    assert batches(arguments, size) == batches(arguments, 1)


def test_shuffling_is_reproducible_and_changes_with_the_epoch() -> None:
    arguments = {"batch_size": 8, "shuffle": True}
    assert batches(arguments, 2) == batches(arguments, 2)
    assert batches(arguments, 2, epoch=1) != batches(arguments, 2)
    assert batches(arguments, 2, seed=5) != batches(arguments, 2)


@pytest.mark.parametrize("make", [SequentialSampler, RandomSampler, lambda data: WeightedRandomSampler([1.0] * 24, 24)])
def test_a_users_sampler_is_shared_out(make: Any) -> None:
    arguments = {"batch_size": 8, "sampler": make(DATA)}
    seen = batches(arguments, 2)
    assert [len(batch) for batch in seen] == [8, 8, 8]
    if not isinstance(arguments["sampler"], WeightedRandomSampler):
        assert sorted(sum(seen, [])) == DATA


def test_a_users_batch_sampler_is_shared_out() -> None:
    arguments = {"batch_sampler": BatchSampler(SequentialSampler(DATA), 6, drop_last=False)}
    assert batches(arguments, 2) == [DATA[i : i + 6] for i in range(0, 24, 6)]


def test_an_uneven_batch_of_a_batch_sampler_is_refused() -> None:
    loader = make_loader(DATA, {"batch_sampler": BatchSampler(SequentialSampler(DATA), 5, drop_last=False)}, 0, 2)
    with pytest.raises(ArgumentError, match="5, the global batch"):
        list(loader)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(21))


def test_a_stream_is_shared_out_and_its_uneven_rest_left() -> None:
    assert batches({"batch_size": 4}, 2, data=Stream()) == [list(range(i, i + 4)) for i in range(0, 20, 4)]


class EveryThird(torch.utils.data.distributed.DistributedSampler[int]):
    """Draws only multiples of three."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank * 3, 24, self.num_replicas * 3))


def test_a_distributed_sampler_class_is_used() -> None:
    seen = batches({"batch_size": 4}, 2, sampler_cls=EveryThird)
    assert sorted(sum(seen, [])) == list(range(0, 24, 3))


def test_arguments_are_not_changed() -> None:
    arguments = {"batch_size": 8, "shuffle": True}
    make_loader(DATA, arguments, 0, 2)
    assert arguments == {"batch_size": 8, "shuffle": True}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 5}, "batch_size is 5, the global batch, which does not divide over 2"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"batch_size": True}, "batch_size True"),
        ({"batchsize": 4}, "did you mean 'batch_size'"),
        ({"batch_size": 64, "drop_last": True}, "24 samples and the global batch is 64"),
        ({"batch_size": 8, "sampler": SequentialSampler(DATA), "shuffle": True}, "both sampler and shuffle"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make_loader(DATA, arguments, 0, 2)


Pair = namedtuple("Pair", ["left", "right"])


def test_nested_data_moves_to_the_device() -> None:
    tensor = torch.ones(2)
    data = {"a": [tensor, Pair(tensor, 3)], "b": "text", "c": (tensor,)}
    moved = to_device(data, "meta")
    assert moved["a"][0].is_meta
    assert moved["a"][1].left.is_meta
    assert moved["a"][1].right == 3
    assert moved["b"] == "text"
    assert moved["c"][0].is_meta
    assert not data["a"][0].is_meta
