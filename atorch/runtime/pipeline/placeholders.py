"""Placeholders in a stage for what other stages have: parameters, buffers, and results that have not come yet.

They have shape, dtype and device, but no values. Shapes of results must be known before a stage receives them. So the
first micro-batch of every size runs once stage by stage, without gradients, and shapes and dtypes are observed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from atorch.errors import ArgumentError
from atorch.model.pytree import leaves_of
from atorch.runtime.chunk.parameter import is_descriptive

_TENSOR: Any = Tensor
_DEVICE = _TENSOR.device.__get__
_BY_SHAPE = frozenset([_TENSOR.expand_as, _TENSOR.view_as, _TENSOR.reshape_as])


class Placeholder(Tensor):
    """A tensor on the meta device that reports the stage's device, for code that creates other tensors on it.

    Results computed from it alone are placeholders, too, since a stage runs the model's entire forward but needs only
    part of it. So are, while code between units runs, results computed from it and other tensors.
    """

    path: str
    place: torch.device
    passes_by: Callable[[], bool]

    @classmethod
    def of(
        cls, path: str, tensor: Tensor, place: torch.device, passes_by: Callable[[], bool] = lambda: False
    ) -> Placeholder:
        """A placeholder for `tensor`, which the model has under the name `path`.

        passes_by: returns True while code runs whose results need no values.
        """
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return cls._from(empty, path, place, passes_by)

    @classmethod
    def _from(cls, empty: Tensor, path: str, place: torch.device, passes_by: Callable[[], bool]) -> Placeholder:
        placeholder = Tensor._make_subclass(cls, empty)
        placeholder.path, placeholder.place, placeholder.passes_by = path, place, passes_by
        return placeholder

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)), None)  # also in lists
        with torch._C.DisableTorchFunctionSubclass():
            if read is not None and func == _DEVICE:
                return read.place
            if read is None or is_descriptive(func) or func in _BY_SHAPE:
                result = func(*args, **kwargs)
                if read is args[0] and result is not read and isinstance(result, Tensor):  # func made a new tensor
                    like = torch.empty((), dtype=read.dtype, device=read.place).expand(read.shape)
                    return func(like, *args[1:], **kwargs)
                return result
            try:
                if read.passes_by():
                    args, kwargs = tree_map(_without_values, (args, kwargs))
                result = func(*args, **kwargs)
            except RuntimeError as error:
                raise read.fault() from error
            if any(isinstance(leaf, Tensor) and not leaf.is_meta for leaf in tree_leaves(result)):
                raise read.fault()  # torch lets real tensors multiply meta ones, with wrong results
            return tree_map(read._like, result)

    def fault(self) -> ArgumentError:
        """The error for code that needs its values."""
        return ArgumentError(
            f"{self.path} is of another stage of the pipeline than the one that reads it. The loss function, or code "
            "between modules, uses it outside of the module that holds it. Compute with it in that module's forward, "
            "or cut elsewhere"
        )

    def _like(self, value: Any) -> Any:
        is_meta = isinstance(value, Tensor) and value.is_meta and not isinstance(value, Placeholder)
        return self._from(value, self.path, self.place, self.passes_by) if is_meta else value

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        return self.of(self.path, self, self.place)


def need_values(data: Any) -> None:
    """Raise the error of the first tensor in `data` that belongs to another stage."""
    for leaf in tree_leaves(data):
        if isinstance(leaf, Placeholder):
            raise leaf.fault()


def _without_values(leaf: Any) -> Any:
    if isinstance(leaf, Placeholder) or not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


ArgumentShapes = tuple[tuple[str, tuple[int, ...]], ...]
"""The place and shape of every tensor in a call's arguments."""


class TensorSpec(NamedTuple):
    """Sizes and dtype of a tensor."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    def zeros(self, device: torch.device) -> Tensor:
        """Zeros of this shape that take no memory."""
        return torch.zeros((), dtype=self.dtype, device=device).expand(self.sizes)


def shape_of(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


def sizes_of(data: Any) -> ArgumentShapes:
    """The sizes of the tensors in `data`, by place."""
    return tuple((place, tuple(leaf.shape)) for place, leaf in leaves_of(data) if isinstance(leaf, Tensor))
