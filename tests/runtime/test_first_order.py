"""Gradients of gradients where processes share a model out are named, not left out."""

import pytest
import torch

from atorch.errors import ArgumentError
from atorch.runtime.tensor_parallel.collectives import fork


def test_a_gradient_penalty_of_split_parts_is_named() -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(ArgumentError, match=r"create_graph=True.*split over processes.*train with ddp or zero1"):
        torch.autograd.grad(fork(x.square(), None).sum(), x, create_graph=True)  # type: ignore[arg-type]
