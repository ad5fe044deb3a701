"""Nested batches, and the parts of a tensor: tensors in mappings, lists, tuples and dataclasses, and in other tensors.

Quantized and nested tensors wrap dense ones, and sparse ones have indices. Collectives and comparisons accept dense
tensors only.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

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
        clone = copy.copy(data)
        for name in (field.name for field in dataclasses.fields(data)):
            object.__setattr__(clone, name, map_leaves(change, getattr(data, name), f"{place}.{name}"))
        return clone
    return change(data, place)


def map_tensors(change: Callable[[torch.Tensor], Any], data: Any) -> Any:
    """`data` with every tensor replaced by `change(tensor)`; other leaves stay."""
    return map_leaves(lambda leaf, place: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, data)


def in_fp32(data: Any) -> Any:
    """`data` with tensors of 16-bit floats cast to fp32; caches and other objects that are no containers stay."""
    narrow = (torch.float16, torch.bfloat16)
    return map_tensors(lambda tensor: tensor.float() if tensor.dtype in narrow else tensor, data)


def leaves_of(data: Any, place: str = "batch") -> list[tuple[str, Any]]:
    """(place, leaf) of every leaf of `map_leaves`, in order."""
    leaves: list[tuple[str, Any]] = []

    def note(leaf: Any, place: str) -> Any:
        leaves.append((place, leaf))
        return leaf

    map_leaves(note, data, place)
    return leaves


def tensors_in(data: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of `data`, in order; keys of mappings may be tensors."""
    if isinstance(data, torch.Tensor):
        return [data]
    items: Iterable[Any] = ()
    if isinstance(data, (list, tuple)):
        items = data
    elif isinstance(data, Mapping):
        items = data.values()
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        items = [getattr(data, field.name) for field in dataclasses.fields(data)]
    return [tensor for item in items for tensor in tensors_in(item)]


def written_tensors(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that an operation with these arguments writes, by its schema."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[index] if index < len(args) else kwargs.get(argument.name))


def is_strings(data: Any) -> bool:
    """True if `data` is a non-empty list of strings."""
    return isinstance(data, list) and bool(data) and all(isinstance(item, (str, bytes)) for item in data)


def refilled(data: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    """A mapping of the class of `data` with the items of `changed`."""
    if type(data) is dict or not isinstance(data, MutableMapping):
        return changed
    clone = copy.copy(data)
    for key, value in changed.items():
        clone[key] = value
    return clone


def batch_size(batch: Any) -> int:
    """The number of samples: the first dimension of the first tensor that has one, else 1."""
    return next((tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim() > 0), 1)


def tensor_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This process's local part of a DTensor; any other tensor unchanged."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """The dense tensors that `tensor` consists of, values first; `tensor` itself where it is dense or a DTensor."""
    if is_traceable_wrapper_subclass(tensor):
        from torch.distributed.tensor import DTensor  # slow to import, but imported already where a DTensor exists

        if isinstance(tensor, DTensor):
            return [tensor]
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [part for component in inner for part in dense_parts(component)]
    if tensor.layout == torch.sparse_coo:
        return [tensor._values(), tensor._indices()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.values(), tensor.crow_indices(), tensor.col_indices()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.values(), tensor.ccol_indices(), tensor.row_indices()]
    return [tensor.values(), tensor._nested_tensor_size()] if tensor.is_nested else [tensor]


def is_dense(tensor: Tensor) -> bool:
    """True if a tensor is its only dense part, so that collectives can send it."""
    parts = dense_parts(tensor)
    return len(parts) == 1 and parts[0] is tensor


def same_values(one: Tensor, other: Tensor) -> bool:
    """True if two tensors of the same layout and class are equal."""
    ours, theirs = dense_parts(one), dense_parts(other)
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
