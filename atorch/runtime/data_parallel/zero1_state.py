"""Conversion between the local optimizer states of ranks that step slices of parameters, and the full state.

A rank saves its share: flat slices of the states of some parameters, and their elements under `slices`. A merged state
has its parameter's shape; scalars such as step counts are equal for all slices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

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
