"""A slice of a parameter is of its memory, follows it, and is lent its part of the gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from atorch.errors import ArgumentError
from atorch.runtime.data_parallel.buckets import follow, gradient_values, lend_gradient, origin, slice_of

WHERE = slice(5, 14)


def pair() -> tuple[nn.Parameter, nn.Parameter]:
    param = nn.Parameter(torch.arange(24.0).view(6, 4))
    return param, slice_of(param, WHERE)


def test_what_is_written_to_one_is_written_to_both() -> None:
    param, piece = pair()
    with torch.no_grad():
        piece.fill_(-1.0)
    assert torch.equal(param.view(-1)[WHERE], piece)
    assert param.view(-1).eq(-1.0).sum() == len(piece)
    assert param._version == piece._version == 1
    assert origin(piece)[0] is param
    assert origin(param) == (param, None)


def test_it_follows_its_parameter() -> None:
    param, piece = pair()
    param.data = torch.ones(6, 4)
    param.requires_grad_(False)
    follow(piece)
    assert torch.equal(piece, torch.ones(9))
    assert not piece.requires_grad
    param.data = torch.ones(4, 6).t()
    with pytest.raises(ArgumentError, match="memory format before"):
        follow(piece)


def test_its_gradient_is_the_parameters_own() -> None:
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


def test_a_sparse_gradient_is_cut() -> None:
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
