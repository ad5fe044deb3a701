"""The choice of splits, against trying everything; and the rows of ranks that they are."""

from collections.abc import Iterator, Sequence
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from atorch.errors import StrategyError
from atorch.profiler.memory_tracker import CommCounter
from atorch.runtime.tensor_parallel import ModelLayout, derive_layout, tensor_parallel
from atorch.runtime.tensor_parallel.derive.block_sandbox import fresh, map_by_place, sandboxed, tensors_of
from atorch.runtime.tensor_parallel.derive.split_validation import Watched
from atorch.runtime.tensor_parallel.layout import Rows
from atorch.runtime.tensor_parallel.layout_selection import Option, choose, counted, most_spared
from atorch.runtime.tensor_parallel.state import in_own_order
from tests.pool import on_ranks
from tests.runtime.tensor_parallel.models import batch, make
from tests.runtime.tensor_parallel.test_split import mesh_of


@given(st.integers(1, 40), st.integers(1, 8))
def test_even_parts_are_those_of_chunk(size: int, degree: int) -> None:
    rows = Rows.even(0, size, degree)
    whole = torch.arange(size)
    parts = [part.tolist() for part in whole.chunk(degree)]
    assert [rows.take(whole, rank).tolist() for rank in range(degree) if rows.count(rank)] == parts
    assert rows.is_in_order
    assert not rows.is_shared
    assert rows.num_met == size


@given(st.lists(st.lists(st.booleans(), min_size=12, max_size=12), min_size=1, max_size=4))
def test_masks_come_back_as_indices(masks: list[list[bool]]) -> None:
    tensors = [torch.tensor(mask) for mask in masks if any(mask)]
    if not tensors:
        return
    rows = Rows.where(1, tensors)
    whole = torch.arange(24).view(2, 12)
    met = torch.stack(tensors).sum(0)
    for rank, mask in enumerate(tensors):
        assert rows.index(rank).tolist() == mask.nonzero().flatten().tolist()
        assert torch.equal(rows.take(whole, rank), whole[:, mask])
        assert rows.count(rank) == int(mask.sum())
    assert rows.is_shared == bool((met > 1).any())
    assert rows.has_own == bool((met == 1).any())
    assert rows.num_met == int((met > 0).sum())


@pytest.mark.parametrize("degree", [2, 3])
def test_fused_rows_go_back_to_their_own_order(degree: int) -> None:
    size = 3 * degree * 2
    runs = [
        [(6 * 0 + part * 2 * degree + 2 * r, part * 2 * degree + 2 * r + 2) for part in range(3)] for r in range(degree)
    ]
    rows = Rows(1, tuple(tuple(own) for own in runs))
    whole = torch.arange(2 * size).view(2, size)
    by_rank = torch.cat([rows.take(whole, rank) for rank in range(degree)], 1)
    assert not rows.is_in_order
    assert not torch.equal(by_rank, whole)
    assert torch.equal(in_own_order(by_rank, rows), whole)


NAMES = "abcdef"
few = st.integers(0, 9)
options_of_few = st.lists(
    st.builds(Option, st.frozensets(st.sampled_from(NAMES), min_size=1, max_size=3), few, st.integers(1, 9), few),
    min_size=1,
    max_size=6,
)


def legal(options: Sequence[Option], ties: Sequence[Sequence[str]]) -> Iterator[list[Option]]:
    """Every choice that cuts no parameter twice, and none under one of its names alone."""
    for made in product([False, True], repeat=len(options)):
        taken = [option for option, is_made in zip(options, made, strict=True) if is_made]
        cut = [name for option in taken for name in option.cuts]
        torn = any(len({name in cut for name in names}) > 1 for names in ties)
        if len(cut) == len(set(cut)) and not torn:
            yield taken


def sums(taken: Sequence[Option]) -> tuple[float, float, float]:
    """Less work, fewer bytes, what is sent: less of each is better."""
    return (
        -sum(option.spared_work for option in taken),
        -sum(option.spared_bytes for option in taken),
        sum(option.sent for option in taken),
    )


@given(options_of_few, st.booleans(), st.none() | st.integers(0, 40), st.sampled_from([1, 1e9]))
def test_it_is_as_good_as_the_best_of_all(options: list[Option], tied: bool, needed: int | None, unit: float) -> None:
    options = [Option(each.cuts, each.spared_work, each.spared_bytes * unit, each.sent) for each in options]
    cut = {name for option in options for name in option.cuts}
    ties = [["a", "b"]] if tied and {"a", "b"} <= cut else []
    found = choose(options, ties, None if needed is None else needed * unit)
    every = [sums(taken) for taken in legal(options, ties)]
    assert -most_spared(options, ties) == min(spared for _, spared, _ in every)
    if needed is None:
        assert found is not None
        assert sums([options[index] for index in found]) == min(every)
        return
    enough = [(sent, work, spared) for work, spared, sent in every if -spared >= needed * unit]
    assert (found is None) == (not enough)
    if found is not None:
        work, spared, sent = sums([options[index] for index in found])
        assert (sent, work, spared) == min(enough)


class Chain(nn.Module):
    """Layers one after another, each of which could go with the one before or the one after."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return self.layers[-1](x)


def derived(model: nn.Module, width: int, **bound: float) -> ModelLayout:
    x = torch.randn(40, width, generator=torch.Generator().manual_seed(0))
    return derive_layout(model, lambda model: model(x), 2, **bound)


@pytest.mark.parametrize(
    ("widths", "cut"),
    [
        ((8, 16, 64, 8), [1, 2]),  # the pair with more work
        ((8, 64, 16, 8), [0, 1]),
        ((8, 8, 32, 8, 8), [0, 1, 2, 3]),  # two pairs, and not the largest one alone
    ],
)
def test_neighbours_that_exclude_each_other(widths: tuple[int, ...], cut: list[int]) -> None:
    layout = derived(Chain(*widths), widths[0])
    assert sorted(name for name in layout.rows if "weight" in name) == [f"layers.{index}.weight" for index in cut]
    whole = set(range(len(widths) - 1)) - set(cut)
    assert {each.name for each in layout.kept} == {f"layers.{index}.weight" for index in whole}
    assert all("with another split" in each.reason for each in layout.kept)


class Uneven(nn.Module):
    """A pair of layers that is cheap to split, and one that spares more, for more that is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.between = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 48), nn.LayerNorm(48))
        self.large = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 48))

    def forward(self, x: Tensor) -> Tensor:
        return self.large(self.between(self.small(x)))


def num_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


SPARED_SMALL, SPARED_LARGE = ((2 * inner * width + inner) * 4 / 2 for inner, width in ((16, 8), (64, 48)))


@pytest.mark.parametrize(
    ("needed", "cut"),
    [
        (0, []),
        (4, ["small"]),
        (SPARED_SMALL, ["small"]),
        (SPARED_SMALL + 4, ["large"]),  # both would spare more, and send more
        (SPARED_LARGE + 4, ["large", "small"]),
        (None, ["large", "small"]),
    ],
)
def test_a_bound_on_memory_says_what_is_worth_sending_for(needed: float | None, cut: list[str]) -> None:
    model = Uneven()
    layout = derived(model, 8) if needed is None else derived(model, 8, parameter_bytes=num_bytes(model) - needed)
    assert sorted({name.split(".")[0] for name in layout.rows}) == cut


@on_ranks()
def test_experts_alone_where_that_is_enough(rank: int, size: int) -> None:
    """Under a bound that a mixture's experts alone can meet, and under one that nothing can."""
    model, x = make("mixtral"), batch("mixtral")
    whole = num_bytes(model)
    told = "(?s)parameter_bytes was given.*of MixtralForCausalLM; give at least so many"
    with pytest.raises(StrategyError, match=told):
        tensor_parallel(model, lambda model: model(**x), mesh_of(size), parameter_bytes=whole / 3)
    assert num_bytes(model) == whole
    layout = tensor_parallel(
        model, lambda model: model(**x), mesh_of(size), parameter_bytes=0.8 * whole, as_dtensors=False
    )
    assert num_bytes(model) / whole <= 0.8
    assert sorted({name.rpartition(".")[2] for name in layout.rows}) == ["down_proj", "gate_up_proj"]
    assert {each.reason for each in layout.kept if "self_attn" in each.name} == {
        "a process holds no more than parameter_bytes without that"
    }


@pytest.mark.parametrize("name", ["bert", "mixtral", pytest.param("gpt2", marks=pytest.mark.nightly)])
@on_ranks()
def test_what_was_counted_is_sent(rank: int, size: int, name: str) -> None:
    """What the groups of each kind of block were counted to send, and what the split block did."""
    model = make(name)
    watched = Watched(model, lambda model: model(**batch(name)))
    whole = {path: sandboxed(watched.blocks[path]) for path in watched.calls}
    layout = tensor_parallel(model, lambda model: model(**batch(name)), mesh_of(size), as_dtensors=False)
    for path, call in watched.calls.items():
        expected = sum(each.sent for each in counted(whole[path], layout.blocks[path], call).values())
        (args, kwargs), asked = fresh(call)
        first = next(iter(asked))  # the others, such as positions, have no gradient in a model
        args, kwargs = map_by_place(lambda at, each, kept=first: each if at == kept else each.detach(), (args, kwargs))
        with CommCounter() as messages:
            outputs = tensors_of(model.get_submodule(path)(*args, **kwargs))
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        assert expected == sum(size for _, size in messages.counts.values()) / 4 > 0
