"""Rows of ranks: even parts, masks and back, what is shared and what is in order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atorch.runtime.tensor_parallel.layout import Rows
from atorch.runtime.tensor_parallel.state import in_own_order


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
