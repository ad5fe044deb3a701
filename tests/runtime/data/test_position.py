"""A loader goes on where it was, on any number of ranks; batches are cut in pieces."""

import random
import types
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, RandomSampler

from atorch.errors import ArgumentError, CheckpointError
from atorch.model.pytree import map_leaves
from atorch.runtime.data.batches import merge, num_rows, take
from atorch.runtime.data.loader import Loader, make_loader


class Numbers(Dataset[int]):
    def __init__(self, num: int) -> None:
        self.num, self.reads = num, 0

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return index


class Stream(IterableDataset[int]):
    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num))


def ranks_of(data: Any, size: int, **arguments: Any) -> list[Loader]:
    return [make_loader(data, arguments, rank, size) for rank in range(size)]


def seen(loaders: list[Loader], num: int | None = None) -> list[list[int]]:
    """The global batches of all ranks' loaders, sorted; `num`: so many, by loops that then stop."""
    by_rank = []
    for loader in loaders:
        batches = []
        for batch in loader:
            batches.append(batch.tolist())
            if len(batches) == num:
                break
        by_rank.append(batches)
    return [sorted(sum(parts, [])) for parts in zip(*by_rank, strict=True)]


def position(loader: Loader, is_same: bool) -> dict[str, Any]:
    state = loader.state_dict()
    return state if is_same else {**state, "began": None}


@settings(max_examples=40, deadline=None)
@given(
    st.integers(8, 40), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.integers(0, 9), st.booleans(),
    st.booleans(), st.integers(0, 3),
)  # fmt: skip
def test_an_epoch_goes_on(
    num: int, before: int, after: int, stop: int, shuffle: bool, is_stream: bool, epoch: int
) -> None:
    data: Any = Stream(num) if is_stream else Numbers(num)
    arguments: dict[str, Any] = {"batch_size": 4, "drop_last": True, **({} if is_stream else {"shuffle": shuffle})}
    whole, first, second = (ranks_of(data, size, **arguments) for size in (1, before, after))
    for loader in (*whole, *first):
        loader.set_epoch(epoch)
    expected = seen(whole)
    stop = min(stop, len(expected))
    found = seen(first, stop) if stop else []
    for loader in second:
        loader.load_state_dict(position(first[0], before == after))
    assert found + (seen(second) if stop < len(expected) else []) == expected


def test_what_was_seen_is_not_read_again() -> None:
    data = Numbers(64)
    loader = make_loader(data, {"batch_size": 4, "shuffle": True}, 0, 1)
    for _ in zip(range(10), loader, strict=False):
        pass
    data.reads = 0
    resumed = make_loader(data, {"batch_size": 4, "shuffle": True}, 0, 1)
    resumed.load_state_dict(loader.state_dict())
    assert len(list(resumed)) == 6
    assert data.reads == 24
    assert len(resumed) == 16
    assert len(list(resumed)) == 16, "the next epoch is a whole one"


@pytest.mark.parametrize("workers", [0, 2])
def test_random_numbers_go_on(workers: int) -> None:
    """The order of a sampler that draws, and what the loop draws beside it."""

    def loop(loader: Loader, num: int) -> list[Any]:
        drawn = []
        for _, batch in zip(range(num), loader, strict=False):
            drawn.append((batch.tolist(), float(torch.rand(())), random.random(), float(np.random.rand())))
        return drawn

    def made() -> Loader:
        data = Numbers(32)
        return make_loader(data, {"batch_size": 4, "sampler": RandomSampler(data), "num_workers": workers}, 0, 1)

    torch.manual_seed(5)
    loader = made()
    loop(loader, 3)
    state, before = loader.state_dict(), (torch.get_rng_state(), random.getstate(), np.random.get_state())
    iterator = iter(loader)
    del iterator
    torch.manual_seed(5)
    whole = made()
    expected = loop(whole, 8)[3:]
    resumed = made()
    resumed.load_state_dict(state)
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    np.random.set_state(before[2])
    assert [entry[:2] for entry in loop(resumed, 5)] == [entry[:2] for entry in expected]


@pytest.mark.parametrize(
    ("change", "told"),
    [({"batch_size": 8}, "global batches of 4"), ({"sampler": RandomSampler(Numbers(32))}, "another order")],
)
def test_other_batches_within_an_epoch_are_refused(change: dict[str, Any], told: str) -> None:
    loader = make_loader(Numbers(32), {"batch_size": 4}, 0, 1)
    next(iter(loader))
    other = make_loader(Numbers(32), {"batch_size": 4, **change}, 0, 1)
    with pytest.raises(CheckpointError, match=told):
        other.load_state_dict(loader.state_dict())
    other.load_state_dict(make_loader(Numbers(32), {"batch_size": 4}, 0, 1).state_dict())


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Record:
    x: torch.Tensor
    name: str = "a"


X = torch.arange(12).reshape(6, 2)


@pytest.mark.parametrize(
    ("wrap", "get"),
    [
        (lambda x: x, lambda d: d),
        (lambda x: {"x": x}, lambda d: d["x"]),
        (lambda x: OrderedDict(x=x), lambda d: d["x"]),
        (lambda x: UserDict(x=x), lambda d: d["x"]),
        (lambda x: defaultdict(list, x=x), lambda d: d["x"]),
        (lambda x: [x, 3], lambda d: d[0]),
        (lambda x: (None, {"x": [x]}), lambda d: d[1]["x"][0]),
        (lambda x: Pair("a", x), lambda d: d.second),
        (lambda x: Record(x), lambda d: d.x),
    ],
)
def test_tensors_are_cut_wherever_they_are(wrap, get):
    data = wrap(X)
    piece = take(data, 2, 4, 6)
    assert type(piece) is type(data)
    assert torch.equal(get(piece), X[2:4])
    assert get(data) is X
    assert get(piece).untyped_storage().data_ptr() == X.untyped_storage().data_ptr()


def test_transformers_containers_keep_their_class():
    transformers = pytest.importorskip("transformers")
    data = transformers.BatchEncoding({"input_ids": X})
    piece = take(data, 0, 2, 6)
    assert type(piece) is type(data)
    assert torch.equal(piece.input_ids, X[:2])
    output = transformers.modeling_outputs.CausalLMOutput(loss=torch.tensor(1.0), logits=X.float())
    cut = take(output, 0, 2, 6)
    assert torch.equal(cut.logits, X[:2].float())
    assert torch.equal(merge([cut, cut], [0.5, 0.5]).logits, torch.cat([X[:2], X[:2]]).float())


def test_a_mapping_that_cannot_be_written_becomes_a_dict():
    assert map_leaves(lambda leaf, place: leaf + 1, types.MappingProxyType({"x": 1})) == {"x": 2}


def test_what_has_no_rows_goes_to_every_piece_and_lists_of_strings_are_cut():
    scalar, single = torch.tensor(1.0), torch.ones(1, 4)
    data = {
        "x": X,
        "scalar": scalar,
        "single": single,
        "flag": True,
        "size": (6, 6),
        "names": [*"abcdef"],
        "few": ["a"],
    }
    piece = take(data, 2, 4, num_rows(batch=data))
    assert piece["scalar"] is scalar
    assert piece["single"] is single
    assert (piece["size"], piece["names"], piece["few"]) == ((6, 6), ["c", "d"], ["a"])


def test_rows_that_differ_are_refused_with_both_places_and_no_rows_are_one():
    with pytest.raises(ArgumentError, match=r"batch\['x'\] has 6 rows there and args\[0\] has 5"):
        num_rows(batch={"x": X}, args=[torch.ones(5)])
    assert num_rows(batch={"x": torch.tensor(3.0)}) == 1


def test_pieces_are_put_together():
    pieces = [
        (torch.tensor(1.0), {"logits": X[:4], "accuracy": 0.5, "name": "a"}, [torch.tensor(2)]),
        (torch.tensor(4.0), {"logits": X[4:], "accuracy": 0.8, "name": "b"}, [torch.tensor(5)]),
    ]
    loss, more, last = merge(pieces, [2 / 3, 1 / 3])
    assert loss.item() == pytest.approx(2.0)
    assert torch.equal(more["logits"], X)
    assert more["accuracy"] == pytest.approx(0.6)
    assert more["name"] == "b"
    assert last[0].item() == pytest.approx(3.0)
    assert merge([torch.tensor(float("nan")), torch.tensor(2.0)], [0.0, 1.0]).item() == 2.0
