"""Fake tensors, with real values for integers.

Positions, masks and tokens do not depend on weights. They are computed for real, so a model may inspect them, for
example to skip the mask if no sequence is padded. Everything computed from a weight is fake and has no memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode

from atorch.errors import ArgumentError
from atorch.model.pytree import local_part, tensors_in

_MOST = 2**26  # elements that an operation on known values may create
_aten = torch.ops.aten


class Fakes:
    """Makes fake tensors of a device, and runs a model on them.

    dtype: replaces floating-point dtypes; None: keeps each tensor's own.
    """

    def __init__(self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> None:
        self._device, self._dtype = torch.device(device), dtype
        # Real tensors that a model still holds, in lists or closures, become fakes on use.
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same shape without memory; for a DTensor, of this process's local part.

        Raises:
            ArgumentError: the tensor is sparse or ragged.
        """
        tensor = local_part(tensor)
        if tensor.layout != torch.strided or tensor.is_nested:
            raise ArgumentError(f"there are no fakes of tensors of layout {tensor.layout}")
        dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        with self._mode:
            made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=self._device)
        return made.requires_grad_(tensor.requires_grad and tensor.is_leaf)

    def fake_unless_known(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake, or a real copy of integers with values."""
        if tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta:
            return self.fake(tensor)
        return tensor.detach().to(self._device, copy=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        with self._mode, _Known():  # type: ignore[no-untyped-call]
            yield


class _Known(TorchDispatchMode):
    """Runs operations on known integers for real, and leaves others to the fakes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_known(func, args, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if _is_grouped(func, args):
            return _grouped(args, kwargs.get("offs"))
        return func(*args, **kwargs)


def _is_known(func: Any, args: Any, kwargs: Any) -> bool:
    tensors = tensors_in((args, kwargs))
    if not tensors:
        is_small = all(abs(number) <= _MOST for number in args if isinstance(number, (int, float)))
        return func._overloadpacket is _aten.arange and is_small
    if any(isinstance(tensor, FakeTensor) or tensor.is_floating_point() for tensor in tensors):
        return False
    if math.prod(max(1, tensor.numel()) for tensor in tensors) <= _MOST:
        return True
    try:
        made = func(*args, **kwargs)  # on fakes, to get the real size: elementwise operations and joins create no pairs
    except (DynamicOutputShapeException, DataDependentOutputException):
        return False
    return sum(tensor.numel() for tensor in tensors_in(made)) <= _MOST


def _is_grouped(func: Any, args: Any) -> bool:
    return func._overloadpacket is _aten._grouped_mm and args[0].dim() == 2


def _grouped(args: Any, offsets: Any = None) -> torch.Tensor:
    """Result of (tokens, inner) @ (experts, inner, columns), or of the weights' gradients (inner, tokens) @ (tokens,
    columns) for every expert; the fakes' own kernel refuses all dtypes but bfloat16.
    """
    data, weight, *others = args
    ends = others[0] if others else offsets
    experts = () if weight.dim() == 3 else (ends.shape[0],)
    return torch.empty(*experts, data.shape[0], weight.shape[-1], dtype=data.dtype, device=data.device)
