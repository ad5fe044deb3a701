"""Flat slices of parameters for an optimizer to step: each is a parameter that shares its original's memory.

Writes to either change both, and bump the version of both. The slice gets its gradient for a step: a slice of the
parameter's, or the entries of a sparse one that fall into it.

A rank saves its share of the optimizer's states: flat slices of the states of some parameters, and their elements under
`slices`. A merged state has its parameter's shape; scalars such as step counts are equal for all slices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from atorch.errors import ArgumentError
from atorch.runtime.optimizer.wrapped_optimizer import dense_gradient

SLICES = "slices"

SavedEntry = Mapping[str, Any]


def merged(shares: Sequence[Mapping[str, Any]], params: Sequence[Tensor]) -> dict[str, Any]:
    """The full state of `params` from the local states of all ranks."""
    parts: dict[Any, list[tuple[int, SavedEntry]]] = {}
    for share in shares:
        for index, entry in share["state"].items():
            start = share[SLICES].get(index, (0, 0))[0]
            parts.setdefault(index, []).append((start, entry))
    cut = {index for share in shares for index in share[SLICES]}
    state = {index: _joined(parts[index], params[index]) if index in cut else parts[index][0][1] for index in parts}
    groups = [_merged_group(parts_of) for parts_of in zip(*(share["param_groups"] for share in shares), strict=True)]
    whole = {key: value for key, value in shares[0].items() if key != SLICES}
    return {**whole, "state": dict(sorted(state.items())), "param_groups": groups}


def sliced(entry: Any, param: Tensor, where: slice) -> Any:
    """The part of a parameter's saved state for the flattened elements `where`."""

    def part(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim() or value.shape != param.shape:
            return value
        return _dense(value).reshape(-1)[where].clone()  # a view would keep the full tensor in memory

    return {key: part(value) for key, value in entry.items()} if isinstance(entry, Mapping) else entry


def _joined(parts: Sequence[tuple[int, SavedEntry]], param: Tensor) -> dict[str, Any]:
    """The state of a full parameter from those of its slices, given with their starts."""
    entries = [entry for _, entry in sorted(parts, key=lambda part: part[0])]

    def whole(key: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        return torch.cat([_dense(entry[key]) for entry in entries]).view(param.shape)

    return {key: whole(key, value) for key, value in entries[0].items()}


def _dense(value: Tensor) -> Tensor:
    return value.to_dense() if value.is_sparse else value


def _merged_group(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    group = {**parts[0], "params": sorted({index for part in parts for index in part["params"]})}
    if "param_names" in group:
        name_of = {i: name for part in parts for i, name in zip(part["params"], part["param_names"], strict=True)}
        group["param_names"] = [name_of[index] for index in group["params"]]
    return group


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
