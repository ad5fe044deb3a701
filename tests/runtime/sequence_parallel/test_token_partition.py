"""Tokens dealt out and put together: values, and gradients that an average makes right."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
import torch.distributed as dist

from atorch.errors import ArgumentError
from atorch.runtime.sequence_parallel import TokenPartition
from tests.pool import on_ranks


def check_round_trip(rank: int, size: int, balanced: bool, averaged: bool) -> None:
    """A weight outside and one inside of what is split, against the same computed whole."""
    share = TokenPartition(dist.group.WORLD, balanced=balanced, averaged=averaged)
    x = torch.arange(2 * 8 * 3, dtype=torch.float64).reshape(2, 8, 3).sin()
    outer, inner = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (1.5, 0.5))
    plain_outer, plain_inner = (each.detach().clone().requires_grad_() for each in (outer, inner))
    own = share.scatter(x * outer, 1)
    whole = share.gather((own * inner).tanh(), 1)
    expected = (x * plain_outer * plain_inner).tanh()
    for each in (whole, expected):
        (each * x.cos()).sum().backward()
    for each in (outer, inner):
        dist.all_reduce(each.grad)
        each.grad /= size
    assert own.shape[1] == 8 // size
    assert torch.equal(own, share.part(x * outer, 1))
    assert torch.allclose(whole, expected)
    assert torch.allclose(outer.grad, plain_outer.grad)
    assert torch.allclose(inner.grad * (1 if averaged else size), plain_inner.grad)


@on_ranks()
def test_pieces_are_in_order_or_from_front_and_back_and_one_average_is_right(rank: int, size: int) -> None:
    for balanced, averaged in product([True, False], repeat=2):
        check_round_trip(rank, size, balanced, averaged)
    tokens = torch.arange(8)
    shares = TokenPartition(dist.group.WORLD), copy.deepcopy(TokenPartition(dist.group.WORLD, balanced=True))
    with pytest.raises(ArgumentError, match="4 equal pieces, but were given with 6 tokens"):
        shares[1].part(tokens[:6], 0)
    assert [share.part(tokens, 0).tolist() for share in shares] == [
        [[0, 1, 2, 3], [0, 1, 6, 7]],
        [[4, 5, 6, 7], [2, 3, 4, 5]],
    ][rank]
