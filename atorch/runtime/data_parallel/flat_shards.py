"""Flat slices of parameters for an optimizer to step: each is a parameter that shares its original's memory.

Writes to either change both, and bump the version of both. The slice gets its gradient for a step: a slice of the
parameter's, or the entries of a sparse one that fall into it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from atorch.errors import ArgumentError
from atorch.runtime.optimizer.wrapped_optimizer import dense_gradient


def slice_of(param: Tensor, where: slice) -> nn.Parameter:
    """A parameter that is the flattened elements `where` of a contiguous parameter."""
    piece = nn.Parameter(_flat(param)[where], param.requires_grad)
    piece.slice_of = (param, where)  # type: ignore[attr-defined]
    return piece


def origin(parameter: Tensor) -> tuple[Tensor, slice | None]:
    """The parameter that `parameter` is a slice of, and its elements; `parameter` and None if it is no slice."""
    source: tuple[Tensor, slice | None] = getattr(parameter, "slice_of", (parameter, None))
    return source


def follow(piece: Tensor) -> None:
    """Update a slice from its parameter, whose memory or `requires_grad` may have changed.

    Raises:
        ArgumentError: the parameter is not contiguous any more.
    """
    param, where = origin(piece)
    assert where is not None
    piece.data = _flat(param)[where]
    piece.requires_grad_(param.requires_grad)


@torch.no_grad()
def lend_gradient(piece: Tensor) -> None:
    param, where = origin(piece)
    gradient = _flat_gradient(param)
    assert where is not None
    if gradient is not None:
        gradient = _flat_sparse(gradient, where) if gradient.is_sparse else gradient[where]
    piece.grad = gradient


def gradient_values(piece: Tensor) -> Tensor | None:
    """The values of the parameter's gradient that a step of the slice reads; all values of a sparse one."""
    param, where = origin(piece)
    gradient = _flat_gradient(param)
    if gradient is None or where is None:
        return gradient
    return gradient.values() if gradient.is_sparse else gradient[where]


def _flat(param: Tensor) -> Tensor:
    if not param.is_contiguous():
        raise ArgumentError(
            f"a parameter of shape {tuple(param.shape)} has another layout in memory than when the optimizer was made, "
            "which steps slices of it; give a model its memory format before it is accelerated"
        )
    return param.detach().view(-1)


def _flat_gradient(param: Tensor) -> Tensor | None:
    if dense_gradient(param) is None:
        return None
    assert param.grad is not None
    if param.grad.is_sparse:
        return param.grad
    if not param.grad.is_contiguous():
        param.grad = param.grad.contiguous()
    return param.grad.detach().view(-1)


def _flat_sparse(gradient: Tensor, where: slice) -> Tensor:
    """A slice of the flattened elements of a coalesced sparse tensor."""
    shape, dims = gradient.shape, gradient.sparse_dim()
    numel = math.prod(shape[dims:])  # of an entry
    entries = torch.zeros(gradient.indices().shape[1], dtype=torch.long, device=gradient.device)  # their flat indices
    for size, index in zip(shape[:dims], gradient.indices(), strict=True):
        entries = entries * size + index
    flat = (entries.unsqueeze(1) * numel + torch.arange(numel, device=entries.device)).reshape(-1) - where.start
    length = where.stop - where.start
    inside = (flat >= 0) & (flat < length)
    indices, values = flat[inside].unsqueeze(0), gradient.values().reshape(-1)[inside]
    return torch.sparse_coo_tensor(indices, values, (length,), is_coalesced=True, check_invariants=False)
