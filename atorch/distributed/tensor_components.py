"""The dense tensors that hold a tensor's values: quantized and nested tensors wrap some, sparse ones have indices.

Collectives and comparisons accept dense tensors only.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


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
