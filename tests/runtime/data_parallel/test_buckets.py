"""Parameters side by side are shared evenly, gathered where they were, and cut into slices of their memory."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from atorch.errors import ArgumentError
from atorch.runtime.data_parallel import buckets as module
from atorch.runtime.data_parallel.buckets import (
    ALIGNMENT,
    can_cut,
    follow,
    gather,
    gradient_values,
    lend_gradient,
    origin,
    slice_of,
    sliced_buckets,
)
from tests.pool import Pool

WHERE = slice(5, 14)


def pair() -> tuple[nn.Parameter, nn.Parameter]:
    param = nn.Parameter(torch.arange(24.0).view(6, 4))
    return param, slice_of(param, WHERE)


def test_a_slice_is_of_its_parameters_memory_and_follows_it() -> None:
    param, piece = pair()
    with torch.no_grad():
        piece.fill_(-1.0)
    assert torch.equal(param.view(-1)[WHERE], piece)
    assert param.view(-1).eq(-1.0).sum() == len(piece)
    assert param._version == piece._version == 1
    assert origin(piece)[0] is param
    assert origin(param) == (param, None)
    param, piece = pair()
    param.data = torch.ones(6, 4)
    param.requires_grad_(False)
    follow(piece)
    assert torch.equal(piece, torch.ones(9))
    assert not piece.requires_grad
    param.data = torch.ones(4, 6).t()
    with pytest.raises(ArgumentError, match="memory format before"):
        follow(piece)


def test_its_gradient_is_the_parameters_own_and_a_sparse_one_is_cut() -> None:
    param, piece = pair()
    lend_gradient(piece)
    assert piece.grad is None
    assert gradient_values(piece) is None
    param.grad = torch.randn(4, 6).t()  # not as the parameter lies
    values = gradient_values(piece)
    assert values is not None
    values.fill_(2.0)
    lend_gradient(piece)
    assert piece.grad is not None
    assert piece.grad.eq(2.0).all()
    assert param.grad.eq(2.0).sum() == len(piece)
    param, piece = pair()
    entries = torch.tensor([[3, 0, 3, 1]])
    param.grad = torch.sparse_coo_tensor(entries, torch.randn(4, 4), (6, 4), check_invariants=True)
    lend_gradient(piece)
    assert piece.grad is not None
    assert piece.grad.is_sparse
    assert torch.equal(piece.grad.to_dense(), param.grad.to_dense().view(-1)[WHERE])
    values = gradient_values(piece)
    assert values is not None
    assert values.shape == (3, 4)


LAYER_70B = ((8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192), *[(28672, 8192)] * 3, (8192,), (8192,))
SHAPES_70B = ((128256, 8192), *LAYER_70B * 80, (8192,), (128256, 8192))


@pytest.mark.parametrize("num_ranks", [8, 512, 4096, 16384])
def test_no_rank_has_much_more_of_70_billion_parameters_than_the_mean(num_ranks: int) -> None:
    shapes = [torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in SHAPES_70B]
    made = sliced_buckets(shapes, num_ranks)
    mean = sum(map(math.prod, SHAPES_70B)) / num_ranks
    held = [where for bucket in made for _, where in bucket.held(0)]  # of the first rank, which has most
    assert sum(where.stop - where.start for where in held) <= 1.001 * mean
    assert sum(bucket.share for bucket in made) <= 1.001 * mean


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=20), st.integers(2, 9))
def test_every_element_is_on_one_rank(sizes: list[int], num_ranks: int) -> None:
    params = [torch.empty(size, device="meta") for size in sizes]
    made = sliced_buckets(params, num_ranks)
    ends = dict.fromkeys(params, 0)
    held = [[part for bucket in made for part in bucket.held(rank)] for rank in range(num_ranks)]
    for param, where in (part for parts in held for part in parts):  # ranks have slices in their order
        assert where.start == ends[param]
        assert where.start % ALIGNMENT == 0
        ends[param] = where.stop
    assert ends == {param: param.numel() for param in params}
    counts = [sum(where.stop - where.start for _, where in parts) for parts in held]
    assert max(counts) <= sum(sizes) / num_ranks + ALIGNMENT * (len(params) + len(made))


def test_what_lies_otherwise_is_not_cut() -> None:
    square = torch.ones(4, 6)
    others = [square.t(), torch.ones(1, 4).expand(3, 4), torch.ones(0, 4), square.to_sparse(), square[:, 1:]]
    assert can_cut(square)
    assert not any(map(can_cut, others))


def arrived(rank: int, size: int, most: int) -> list[bool]:
    """Parameters of several dtypes, of which each rank has another number in its slices."""
    shapes = [(3,), (5, 40), (64 * size,), (), (100,), (4096,)]
    params = [torch.full(shape, -1.0, dtype=kind) for shape in shapes for kind in (torch.float32, torch.bfloat16)]
    group: Any = dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BUCKET_BYTES", most)
        made = sliced_buckets(params, size)
    for bucket in made:
        for param, where in bucket.held(rank):
            param.view(-1)[where] = rank
    gather(made, group)
    expected = {
        param: torch.cat([param.new_full((part.stop - part.start,), float(each)) for each, part in parts])
        for param, parts in {
            param: [(each, w) for each in range(size) for bucket in made for p, w in bucket.held(each) if p is param]
            for param in params
        }.items()
    }
    return [torch.equal(param.view(-1), expected[param]) for param in params]


@pytest.mark.parametrize(("ranks", "most"), [(2, 2**25), (3, 600)])
def test_slices_of_others_arrive(pool: Pool, ranks: int, most: int) -> None:
    for found in pool.run(arrived, most, ranks=ranks):
        assert all(found)
