"""Global batches are split over ranks: together the ranks see exactly what one process would."""

import random
import tracemalloc
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from atorch.errors import ArgumentError
from atorch.runtime.data.loader import make_loader, to_device
from atorch.runtime.data.samplers import LargeSampler, Permutation
from tests.operations import waited_for

DATA = list(range(24))


def batches(arguments: dict[str, Any], size: int, epoch: int = 0, data: Any = DATA, **more: Any) -> list[list[int]]:
    """The global batches, each as the sorted union of what the ranks see."""
    loaders = [make_loader(data, arguments, rank, size, **more) for rank in range(size)]
    for loader in loaders:
        loader.set_epoch(epoch)
    return [sorted(int(i) for part in parts for i in part) for parts in zip(*loaders, strict=True)]


@pytest.mark.parametrize(("size", "shuffle"), [(2, True), (4, False)])
def test_ranks_together_see_the_single_process_batches(size: int, shuffle: bool) -> None:
    arguments = {"batch_size": 8, "shuffle": shuffle}
    assert batches(arguments, size) == batches(arguments, 1)


def test_shuffling_is_reproducible_and_changes_with_the_epoch() -> None:
    arguments = {"batch_size": 8, "shuffle": True}
    assert batches(arguments, 2) == batches(arguments, 2)
    assert batches(arguments, 2, epoch=1) != batches(arguments, 2)
    assert batches(arguments, 2, seed=5) != batches(arguments, 2)


@pytest.mark.parametrize("num", [1, 2, 3, 1000, 4097])
def test_a_computed_order_has_every_sample_once(num: int) -> None:
    order = Permutation(num, seed=3)(np.arange(num))
    assert sorted(order.tolist()) == list(range(num))
    if num >= 1000:
        assert order.tolist() != Permutation(num, seed=4)(np.arange(num)).tolist()
        assert abs(np.corrcoef(np.arange(num), order)[0, 1]) < 0.1
        steps = np.abs(np.diff(order))
        assert np.mean(steps) == pytest.approx(num / 3, rel=0.1)  # as of two random numbers


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_computed_order_is_shared_out_as_torchs(shuffle: bool, drop_last: bool) -> None:
    def drawn(kind: type[DistributedSampler[Any]]) -> list[list[int]]:
        samplers = [kind(range(1003), 4, rank, shuffle=shuffle, drop_last=drop_last) for rank in range(4)]
        for sampler in samplers:
            sampler.set_epoch(2)
        return [list(sampler) for sampler in samplers]

    computed, torchs = drawn(LargeSampler), drawn(DistributedSampler)
    assert [len(each) for each in computed] == [len(each) for each in torchs]
    whole = [index for turn in zip(*computed, strict=True) for index in turn]
    assert len(set(whole)) == min(1003, len(whole))
    assert whole[1003:] == whole[: max(0, len(whole) - 1003)]
    if not shuffle:
        assert computed == torchs


def test_a_thousand_million_samples_take_little_memory_and_no_wait() -> None:
    loader = make_loader(range(10**9), {"batch_size": 64, "shuffle": True}, rank=3, size=8)
    tracemalloc.start()
    try:
        first = next(iter(loader))
        assert tracemalloc.get_traced_memory()[1] < 30 * 2**20
    finally:
        tracemalloc.stop()
    assert len(set(first.tolist())) == 8
    assert len(loader) == 10**9 // 64


@pytest.mark.parametrize("make", [SequentialSampler, RandomSampler, lambda data: WeightedRandomSampler([1.0] * 24, 24)])
def test_a_users_sampler_is_shared_out(make: Any) -> None:
    arguments = {"batch_size": 8, "sampler": make(DATA)}
    seen = batches(arguments, 2)
    assert [len(batch) for batch in seen] == [8, 8, 8]
    if not isinstance(arguments["sampler"], WeightedRandomSampler):
        assert sorted(sum(seen, [])) == DATA


def in_sixes(data: Any = DATA, size: int = 6) -> dict[str, Any]:
    return {"batch_sampler": BatchSampler(SequentialSampler(data), size, drop_last=False)}


def test_a_users_batch_sampler_is_shared_out() -> None:
    assert batches(in_sixes(), 2) == [DATA[i : i + 6] for i in range(0, 24, 6)]


@pytest.mark.parametrize("num", [11, 15, 21, 24])
@pytest.mark.parametrize("more", [{}, {"sampler": None}])
def test_drop_last_makes_no_batch_out_of_padding(num: int, more: dict[str, Any]) -> None:
    data = list(range(num))
    arguments = {"batch_size": 8, "drop_last": True, **{name: SequentialSampler(data) for name in more}}
    assert batches(arguments, 4, data=data) == batches(arguments, 1, data=data)


class ShuffledByPython(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(DATA, len(DATA)))

    def __len__(self) -> int:
        return len(DATA)


def test_a_sampler_of_pythons_random_numbers_has_one_order_on_all_ranks() -> None:
    random.seed(1)
    state = random.getstate()
    seen = batches({"batch_size": 8, "sampler": ShuffledByPython()}, 2)
    assert sorted(sum(seen, [])) == DATA
    assert random.getstate() == state


def test_batch_size_none_takes_samples_as_batches() -> None:
    data = [torch.arange(3), torch.arange(4)]
    loader = make_loader(data, {"batch_size": None}, 0, 1)  # type: ignore[arg-type]
    assert [batch.tolist() for batch in loader] == [[0, 1, 2], [0, 1, 2, 3]]


OF_RANK_1: Any = DistributedSampler(DATA, num_replicas=2, rank=1, shuffle=False)  # type: ignore[arg-type]


def test_a_distributed_sampler_of_this_rank_is_taken_as_it_is() -> None:
    loader = make_loader(DATA, {"batch_size": 8, "sampler": OF_RANK_1}, 1, 2)  # type: ignore[arg-type]
    assert next(iter(loader)).tolist() == [1, 3, 5, 7]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(21))


class Endless(Sampler[Any]):
    """Random indices without an end, as samplers for training by steps draw them."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(len(DATA), ()))


def test_a_sampler_without_an_end_is_drawn_from_as_it_is_used() -> None:
    ranks = [iter(make_loader(DATA, {"sampler": Endless(), "batch_size": 4}, rank, 2)) for rank in range(2)]
    ours = [torch.cat([next(each) for _ in range(1500)]) for each in ranks]
    torch.manual_seed(0)  # between draws the user's own random numbers go on, and the sampler's do as well
    drawn = torch.stack([torch.randint(len(DATA), ()) for _ in range(6000)])
    expected = torch.tensor(DATA)[drawn]
    assert torch.equal(ours[0], expected[0::2])
    assert torch.equal(ours[1], expected[1::2])
    loader = iter(make_loader(DATA, {"batch_sampler": BatchSampler(Endless(), 4, drop_last=True)}, 0, 2))
    assert [len(next(loader)) for _ in range(3)] == [2, 2, 2]


def test_a_stream_is_shared_out_without_its_uneven_rest_and_a_sampler_class_is_used() -> None:
    assert batches({"batch_size": 4}, 2, data=Stream()) == [list(range(i, i + 4)) for i in range(0, 20, 4)]
    seen = batches({"batch_size": 4}, 2, sampler_cls=EveryThird)
    assert sorted(sum(seen, [])) == list(range(0, 24, 3))


class EveryThird(torch.utils.data.distributed.DistributedSampler[int]):
    """Draws only multiples of three."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank * 3, 24, self.num_replicas * 3))


@pytest.mark.parametrize(
    ("data", "arguments", "message"),
    [
        (DATA, {"batch_size": 5}, "batch_size is 5, the global batch, which does not divide over 2 .*; use 4 or 6$"),
        (DATA, {"batch_size": 1}, "batch_size is 1, the global batch, .*; use 2, or fewer processes$"),
        (DATA, {"batch_size": 0}, "batch_size 0"),
        (DATA, {"batch_size": True}, "batch_size True"),
        (DATA, {"batchsize": 4}, "did you mean 'batch_size'"),
        (DATA, {"batch_size": 64, "drop_last": True}, "24 samples and the global batch is 64"),
        (DATA, {"batch_size": 8, "sampler": SequentialSampler(DATA), "shuffle": True}, "both sampler and shuffle"),
        (DATA, {"batch_size": 8, "sampler": OF_RANK_1}, "for rank 1 of 2, but this process is 0 of 2"),
        (DATA, {"batch_size": None}, "batch_size None"),
        (3, {}, "dataset is a int"),
        (DATA, in_sixes(size=5), "5, the global batch"),
        (DATA[:21], in_sixes(DATA[:21], 8), "5, the global batch"),
        (DATA, {"sampler": SequentialSampler(DATA), "sampler_cls": EveryThird}, "given with sampler"),
        (DATA, {**in_sixes(), "sampler_cls": EveryThird}, "given with batch_sampler"),
        (Stream(), {"sampler_cls": EveryThird}, "given with an IterableDataset"),
    ],
)
def test_bad_arguments_are_refused_before_the_epoch(data: Any, arguments: dict[str, Any], message: str) -> None:
    given, sampler_cls = dict(arguments), arguments.get("sampler_cls")
    given.pop("sampler_cls", None)
    with pytest.raises(ArgumentError, match=message):
        next(iter(make_loader(data, given, 0, 2, sampler_cls=sampler_cls)))


Pair = namedtuple("Pair", ["left", "right"])


def test_nested_data_and_packed_sequences_move_to_the_device_and_copies_to_the_host_are_waited_for() -> None:
    tensor = torch.ones(2)
    data = {"a": [tensor, Pair(tensor, 3)], "b": "text", "c": pack_sequence([torch.ones(3), torch.ones(2)])}
    moved = to_device(data, "meta")
    assert moved["a"][0].is_meta
    assert moved["a"][1].left.is_meta
    assert (moved["a"][1].right, moved["b"]) == (3, "text")
    assert moved["c"].data.is_meta
    assert not moved["c"].batch_sizes.is_meta
    assert not data["a"][0].is_meta
    with FakeTensorMode():
        batch = {"tokens": [torch.empty(4, device="cuda")]}
        assert waited_for(lambda: to_device(batch, torch.device("cpu"))) == [True]
