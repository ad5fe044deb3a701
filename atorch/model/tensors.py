"""Tensors in nested data structures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def tensor_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def tensors_of(data: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested mappings, lists, tuples and sets."""
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from tensors_of(value)
    elif isinstance(data, (list, tuple, set, frozenset)):
        for value in data:
            yield from tensors_of(value)


def map_tensors(convert: Callable[[torch.Tensor], torch.Tensor], data: Any) -> Any:
    """`data` with `convert(tensor)` for every tensor; mappings keep their class if it can be made from a dict."""
    if isinstance(data, torch.Tensor):
        return convert(data)
    if isinstance(data, Mapping):
        mapped = {key: map_tensors(convert, value) for key, value in data.items()}
        try:
            return type(data)(mapped)  # type: ignore[call-arg]
        except TypeError:
            return mapped
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_tensors(convert, value) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(map_tensors(convert, value) for value in data)
    return data


def batch_size(batch: Any) -> int:
    """The number of samples: the first dimension of the first tensor that has one, else 1."""
    return next((tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim() > 0), 1)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This process's local part of a DTensor; any other tensor unchanged."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part
