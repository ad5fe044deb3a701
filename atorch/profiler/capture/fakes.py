"""Fake tensors, and values of integers that are known all the same.

Positions, masks and tokens do not depend on weights: they are computed for real, so that a model may look at them, as
one does that leaves out a causal mask where no sequence is padded. Whatever meets a weight is fake, without memory.
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
from atorch.model.tensors import local_part, tensors_of

_MOST = 2**26  # elements that an operation on known values may make
_aten = torch.ops.aten


class Fakes:
    """Makes fake tensors of a device, and runs a model on them.

    dtype: of what is in floating point, whatever it is in; None: that of each.
    """

    def __init__(self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> None:
        self._device, self._dtype = torch.device(device), dtype
        # Real tensors that a model still holds, in lists or closures, become fakes where they are used.
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same shape and no memory: of a DTensor, of the part that this process has.

        Raises:
            ArgumentError: it is sparse or ragged.
        """
        tensor = local_part(tensor)
        if tensor.layout != torch.strided or tensor.is_nested:
            raise ArgumentError(f"there are no fakes of tensors of layout {tensor.layout}")
        dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        with self._mode:
            made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=self._device)
        return made.requires_grad_(tensor.requires_grad and tensor.is_leaf)

    def fake_unless_known(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake, or a copy of integers that have values."""
        if tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta:
            return self.fake(tensor)
        return tensor.detach().to(self._device, copy=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        with self._mode, _Known():  # type: ignore[no-untyped-call]
            yield


class _Known(TorchDispatchMode):
    """Runs for real what has only known integers to go by, and else leaves it to the fakes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_known(func, args, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if _is_grouped(func, args):
            return _grouped(args, kwargs.get("offs"))
        return func(*args, **kwargs)


def _is_known(func: Any, args: Any, kwargs: Any) -> bool:
    tensors = list(tensors_of((args, kwargs)))
    if not tensors:
        is_small = all(abs(each) <= _MOST for each in args if isinstance(each, (int, float)))
        return func._overloadpacket is _aten.arange and is_small
    if any(isinstance(each, FakeTensor) or each.is_floating_point() for each in tensors):
        return False
    if math.prod(max(1, each.numel()) for each in tensors) <= _MOST:
        return True
    try:
        made = func(*args, **kwargs)  # a fake: what is added element by element, or joined, makes no pairs
    except (DynamicOutputShapeException, DataDependentOutputException):
        return False
    return sum(each.numel() for each in tensors_of(made)) <= _MOST


def _is_grouped(func: Any, args: Any) -> bool:
    return func._overloadpacket is _aten._grouped_mm and args[0].dim() == 2


def _grouped(args: Any, offsets: Any = None) -> torch.Tensor:
    """Result of (tokens, inner) @ (experts, inner, columns) or (inner, tokens) @ (tokens, columns) of every expert,
    the gradient of its weight; the fakes' own kernel refuses all but bfloat16.
    """
    data, weight, *others = args
    ends = others[0] if others else offsets
    experts = () if weight.dim() == 3 else (ends.shape[0],)
    return torch.empty(*experts, data.shape[0], weight.shape[-1], dtype=data.dtype, device=data.device)
