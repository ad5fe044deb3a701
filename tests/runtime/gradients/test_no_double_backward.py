"""Gradients of gradients where processes share a model out are named, not left out."""

from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from atorch.errors import ArgumentError
from atorch.runtime.sequence_parallel.token_partition import TokenPartition
from atorch.runtime.tensor_parallel.split_forward import fork, gather, reduce, share
from tests.pool import on_ranks


@on_ranks(1)
def test_a_gradient_penalty_of_split_parts_is_named(rank: int, size: int) -> None:
    """What lies between a parameter and the loss may be any of these alone."""
    group = dist.group.WORLD
    assert group is not None
    ways: Mapping[str, Callable[[Tensor], Tensor]] = {
        "fork": partial(fork, group=group),
        "reduce": partial(reduce, group=group),
        "share": partial(share, size=1),
        "gather": partial(gather, counts=[3], group=group),
        "tokens": partial(TokenPartition(group).gather, dim=0),
    }
    for way in ways.values():
        x = torch.ones(3, requires_grad=True)
        with pytest.raises(ArgumentError, match=r"create_graph=True.*split over processes.*train with ddp or zero1"):
            torch.autograd.grad(way(x.square()).sum(), x, create_graph=True)
