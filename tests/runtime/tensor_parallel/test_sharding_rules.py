"""Views of a rank's part are parts of the whole's view, for dims that keep to themselves and for dims of tokens."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from atorch.runtime.sequence_parallel.token_partition import TokenPartition, Tokens
from atorch.runtime.tensor_parallel.sharding_rules import local_call
from atorch.runtime.tensor_parallel.split_loss import VocabularyShards

X = torch.arange(2.0 * 1 * 8 * 6).view(2, 1, 8, 6)
MASK = torch.tensor([[True], [False]])


def layouts(axis: int, rank: int) -> dict[str, Any]:
    """The layouts of a dim of two ranks."""
    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: rank)
    count, first = X.shape[axis], X.shape[axis] // 2 + 1
    return {
        "columns": VocabularyShards((first, count - first), rank, group),
        "tokens": Tokens.all_of(TokenPartition(group), count),
    }


BY_BOTH, BY_TOKENS, BY_NONE = "columns or tokens", "tokens", "none"


@pytest.mark.parametrize(
    ("axis", "func", "args", "ruled"),
    [
        (3, Tensor.view, (-1, 6), BY_BOTH),
        (3, Tensor.view, ([16, 6],), BY_BOTH),
        (3, Tensor.reshape, (96,), BY_TOKENS),
        (3, Tensor.reshape, (16, 5), BY_NONE),
        (2, Tensor.view, (2, 8, 2, 3), BY_BOTH),
        (2, Tensor.view, (16, 6), BY_TOKENS),
        (2, Tensor.view, (2, 48), BY_TOKENS),
        (2, torch.reshape, ((4, 4, 6),), BY_NONE),
        (2, Tensor.flatten, (0, 1), BY_BOTH),
        (2, torch.flatten, (1, 2), BY_BOTH),  # with a dim of one element
        (2, torch.flatten, (), BY_TOKENS),
        (3, Tensor.squeeze, (1,), BY_BOTH),
        (3, Tensor.squeeze, (2,), BY_BOTH),
        (3, Tensor.squeeze, (-1,), BY_NONE),
        (2, Tensor.unsqueeze, (2,), BY_BOTH),
        (2, torch.unsqueeze, (-1,), BY_BOTH),
        (2, Tensor.transpose, (-1, 2), BY_BOTH),
        (2, Tensor.permute, (3, 0, 2, 1), BY_BOTH),
        (3, torch.permute, ((3, -4, 2, 1),), BY_BOTH),
        (2, Tensor.__getitem__, (0,), BY_BOTH),
        (2, Tensor.__getitem__, ((..., None, slice(None), 2),), BY_BOTH),
        (2, Tensor.__getitem__, ((slice(None), 0, slice(1, -2)),), BY_TOKENS),
        (2, Tensor.__getitem__, ((0, 0, slice(0, 8, 2)),), BY_NONE),
        (2, Tensor.__getitem__, ((0, 0, 3),), BY_NONE),
        (2, Tensor.__getitem__, (MASK,), BY_NONE),
        (3, Tensor.__getitem__, (MASK,), BY_BOTH),
        (3, Tensor.__getitem__, ((torch.tensor([1, 0, 1]), 0),), BY_BOTH),
        (3, Tensor.__getitem__, ((..., torch.tensor([1, 0])),), BY_NONE),
        (3, Tensor.__getitem__, ((0, None, MASK[0]),), BY_BOTH),
        (3, torch.mul, (2.0,), BY_BOTH),
        (3, torch.mul, (torch.ones(6),), BY_NONE),
        (3, Tensor.to, (torch.float64,), BY_BOTH),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_view_of_a_part_is_a_part_of_the_view(
    axis: int, func: Callable[..., Any], args: tuple[Any, ...], ruled: str
) -> None:
    for rank in range(2):
        for name, layout in layouts(axis, rank).items():
            call = local_call(func, tuple(X.shape), layout, axis, args, {})
            assert (call is not None) == (name in ruled), name
            if call is not None:
                whole, part = func(X, *args), call.make(layout.take(X, axis))
                expected = call.layout.take(whole, call.axis)
                inside = expected != 0  # outside of a window a part keeps its tokens, where a cut has zeros
                assert part.shape == expected.shape
                assert part[inside].equal(expected[inside])


def test_a_window_of_a_window_is_one() -> None:
    tokens = layouts(2, 0)["tokens"]
    assert tokens.window(1, 8).window(0, 5) == tokens.window(1, 6)
    assert tokens.resized(2, 1).window(0, 5) is None
    assert tokens.of_gradients().scale == 1 / 2


def test_samples_and_tokens_can_be_merged_and_parted_again() -> None:
    for rank in range(2):
        layout, axis = layouts(2, rank)["tokens"], 2
        whole, part = X, layout.take(X, 2)
        for func, args in (
            (Tensor.reshape, (16, 6)),
            (Tensor.view, (2, 48)),
            (Tensor.transpose, (0, 1)),
            (Tensor.transpose, (0, 1)),
            (Tensor.flatten, ()),
            (Tensor.view, (2, 4, 2, 6)),
            (Tensor.view, (2, 8, 2, 3)),
        ):
            call = local_call(func, tuple(whole.shape), layout, axis, args, {})
            if call is None:  # no rank has all of its tokens in one of the dims
                assert args == (2, 4, 2, 6)
                continue
            whole, part, layout, axis = func(whole, *args), call.make(part), call.layout, call.axis
            assert part.equal(layout.take(whole, axis))
        assert (layout.outer, layout.inner) == (1, 1)
