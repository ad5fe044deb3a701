"""Nested batches: tensors in mappings, lists, tuples, named tuples and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

LeafFn = Callable[[Any, str], Any]


def map_leaves(change: LeafFn, data: Any, place: str = "batch") -> Any:
    """`data` with every leaf replaced by `change(leaf, place)`; a place looks like `batch['labels'][0]`.

    Containers keep their class and are copied, never changed. A list of strings is a leaf: a loader collates strings
    like this, one a sample.
    """
    if isinstance(data, torch.Tensor):
        return change(data, place)
    if isinstance(data, Mapping):
        return refilled(data, {key: map_leaves(change, value, f"{place}[{key!r}]") for key, value in data.items()})
    if isinstance(data, (list, tuple)) and not is_strings(data):
        items = [map_leaves(change, item, f"{place}[{index}]") for index, item in enumerate(data)]
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        twin = copy.copy(data)
        for name in (field.name for field in dataclasses.fields(data)):
            object.__setattr__(twin, name, map_leaves(change, getattr(data, name), f"{place}.{name}"))
        return twin
    return change(data, place)


def map_tensors(change: Callable[[torch.Tensor], Any], data: Any) -> Any:
    """`data` with every tensor replaced by `change(tensor)`; other leaves stay."""
    return map_leaves(lambda leaf, place: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, data)


def leaves_of(data: Any, place: str = "batch") -> list[tuple[str, Any]]:
    """(place, leaf) of every leaf of `map_leaves`, in order."""
    leaves: list[tuple[str, Any]] = []

    def note(leaf: Any, place: str) -> Any:
        leaves.append((place, leaf))
        return leaf

    map_leaves(note, data, place)
    return leaves


def tensors_in(data: Any) -> list[torch.Tensor]:
    return [leaf for _, leaf in leaves_of(data) if isinstance(leaf, torch.Tensor)]


def is_strings(data: Any) -> bool:
    """True if `data` is a non-empty list of strings."""
    return isinstance(data, list) and bool(data) and all(isinstance(item, (str, bytes)) for item in data)


def refilled(data: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    """A mapping of the class of `data` with the items of `changed`."""
    if type(data) is dict or not isinstance(data, MutableMapping):
        return changed
    twin = copy.copy(data)
    for key, value in changed.items():
        twin[key] = value
    return twin
