"""Tensors of which each rank has a part, and which behave like the whole tensors.

A subclass runs some functions on the parts, by `on_part`. Every other function gathers first, once; the tensor is then
a whole one like any other. All ranks must call it, since all must gather. A rank that prints a metric alone would wait
in vain, or receive what the others send next. So the ranks meet before a gather begins, and an error names missing
ones.

Autograd sees the whole: gradients have its shape, and are split if they come from split tensors. A view of a split
tensor remembers its base, so that a write into the view reaches the base.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only
from typing_extensions import Self

from atorch.distributed.collectives import checked_barrier


class TrackedDim:
    """A dim of `outer` × elements × `inner`, of which a part has `part_size` elements; functions may change it."""

    part_size: int
    outer: int = 1
    inner: int = 1

    def resized(self, outer: int, inner: int) -> Any:
        """The layout with other factors; None if the dim cannot be merged with others."""
        return self if outer == inner == 1 else None

    def window(self, start: int, stop: int) -> Any:
        """The layout of the elements from `start` to before `stop`; None if all must be kept."""
        return None


class DimSharding(TrackedDim):
    """A rank's part of a whole along one dim."""

    group: dist.ProcessGroup
    """The ranks that have the parts."""
    total: int
    """The length of the whole."""
    averages_gradients = False
    """True if parameters get the average of the gradients that ranks compute from their parts."""

    def take(self, whole: Tensor, dim: int) -> Tensor:
        raise NotImplementedError

    def join(self, part: Tensor, dim: int) -> Tensor:
        """The whole, from every rank's part. Without gradients."""
        raise NotImplementedError

    def gradient_of(self, grad: Tensor, dim: int) -> Tensor:
        """The gradient of this rank's part, from the whole's."""
        return self.take(grad, dim)

    def of_gradients(self) -> DimSharding:
        """The layout of the whole's gradient, whose parts are the parts' gradients."""
        return self

    def named(self) -> str:
        """A rank's part, described for messages."""
        raise NotImplementedError

    def note_gather(self, name: str, shape: tuple[int, ...]) -> None:
        """Called before all ranks gather a tensor of `shape` for the function `name`."""


class PartialTensor(Tensor):
    """A tensor that some functions compute with in part; any other function is called on the whole one."""

    _is_whole: bool
    """True if the whole was computed."""
    _reading: frozenset[Callable[..., Any]] = frozenset()
    """Functions that read values of these tensors, and of no others."""

    @classmethod
    def on_part(cls, func: Callable[..., Any], tensor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function of `tensor` and more in part; NotImplemented if it needs the whole."""
        return NotImplemented

    def read(self, func: Callable[..., Any], is_written: bool) -> Tensor:
        """The whole, for a function that may write it."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if reads_no_values(func) and func not in cls._reading:
            with as_tensors():
                return func(*args, **kwargs)
        if args and isinstance(args[0], cls) and not args[0]._is_whole:
            result = cls.on_part(func, args[0], args[1:], kwargs)
            if result is not NotImplemented:
                return result
        is_written = writes(func) or "out" in kwargs
        by_tensor: dict[int, PartialTensor] = {}

        def whole(argument: PartialTensor) -> Tensor:
            tensor = argument.read(func, is_written)
            by_tensor[id(tensor)] = argument
            return tensor

        whole_args, whole_kwargs = tree_map_only(cls, whole, (args, kwargs))
        result = func(*whole_args, **whole_kwargs)
        return by_tensor.get(id(result), result)  # an argument that is returned keeps its class


def strides_of_whole(part: Tensor, axis: int, total: int) -> list[int]:
    """The strides of a tensor like `part`, with `total` elements along `axis`."""
    size = part.shape[axis]
    return [  # strides that step over whole parts grow by the same factor as the dim
        stride // size * total if size and dim != axis and part.stride(axis) <= stride else stride
        for dim, stride in enumerate(part.stride())
    ]


class SplitTensor(PartialTensor):
    """A tensor of which this rank holds a part along one dim."""

    _part: Tensor
    _layout: Any
    _axis: int
    _whole: Tensor | None
    _origin: tuple[SplitTensor, Callable[[Tensor], Tensor]] | None

    @staticmethod
    def __new__(cls, part: Tensor, layout: DimSharding, axis: int) -> Self:
        """Wrap `part`, detached; its dim `axis` is the split one."""
        sizes = [layout.total if dim == axis else size for dim, size in enumerate(part.shape)]
        strides = strides_of_whole(part, axis, layout.total)
        split: Self = Tensor._make_wrapper_subclass(cls, sizes, strides=strides, dtype=part.dtype, device=part.device)
        split._part, split._layout, split._axis = part.detach(), layout, axis
        split._whole = split._origin = None
        return split

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        """Communicates nothing: the other processes may not print it."""
        if self._is_whole:
            return repr(self._values())
        return f"{type(self).__name__}({self._part}, {self._layout.named()})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_part"], (self._layout, self._axis)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, sizes: Any, strides: Any) -> SplitTensor:
        return cls(inner["_part"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Handle the operations of autograd itself: it adds and copies gradients."""
        if func in _OF_AUTOGRAD:
            first = next(argument for argument in args if isinstance(argument, SplitTensor))
            parts = [first._same_part(argument) if isinstance(argument, Tensor) else argument for argument in args]
            return type(first)(func(*parts, **(kwargs or {})), first._layout, first._axis)
        args, kwargs = tree_map_only(SplitTensor, SplitTensor._values, (args, kwargs or {}))
        return func(*args, **kwargs)

    def like(self, part: Tensor, axis: int | None = None) -> Any:
        """The split tensor of which this rank has `part`, along the dim `axis` or the same."""
        return from_part(type(self), part, self._layout, self._axis if axis is None else axis)

    @property
    def _is_whole(self) -> bool:  # type: ignore[override]
        """True if this tensor, or the one that it is a view of, was gathered."""
        return self._whole is not None or (self._origin is not None and self._origin[0]._is_whole)

    def read(self, func: Callable[..., Any], is_written: bool) -> Tensor:
        if not self._is_whole:
            self._meet(func)
        return self._as_whole(is_written)

    def _meet(self, func: Callable[..., Any]) -> None:
        """Wait until all ranks call for a gather, before any of them sends its part."""
        name = getattr(func, "__name__", str(func))
        call = f"{name} of a tensor of {tuple(self.shape)} that is split over ranks and has to be gathered"
        checked_barrier(call, self._layout.group, "split")
        if isinstance(self._part, SplitTensor):  # along another dim
            self._part._meet(func)

    def _same_part(self, other: Tensor) -> Tensor:
        """This rank's part of a tensor of this shape, detached."""
        if isinstance(other, SplitTensor):
            if other._axis == self._axis and other._layout == self._layout:
                return other._own()
            other = other._values()
        return self._layout.take(other, self._axis)  # type: ignore[no-any-return]

    def _own(self) -> Tensor:
        if self._is_whole:
            return self._layout.take(self._values(), self._axis)  # type: ignore[no-any-return]
        return self._part

    def _values(self) -> Tensor:
        """The whole tensor, detached; for a view, a view of its base."""
        if self._whole is None:
            with torch.no_grad():
                if self._origin is None:
                    self._whole = self._layout.join(self._part, self._axis)
                else:
                    base, take = self._origin
                    self._whole = take(base._values())
                self._part = self._layout.take(self._whole, self._axis)  # a view, so that writes to one reach both
        return self._whole

    def _as_whole(self, writes: bool) -> Tensor:
        """The whole as an ordinary tensor, with this one's place in autograd's graph."""
        if self._origin is not None:
            base, take = self._origin
            if writes or base._was_written:
                return take(base._as_whole(writes))
        self._values()
        with as_tensors():
            return self.view(self.shape)

    @property
    def _was_written(self) -> bool:
        if self._origin is not None and self._origin[0]._was_written:
            return True
        with as_tensors():
            return not self.is_inference() and self._version > 0


def from_part(kind: type[SplitTensor], part: Tensor, layout: DimSharding, axis: int) -> Any:
    """The split tensor of which this rank has `part`, in autograd's graph."""
    return _FromPart.apply(part, kind, layout, axis)  # type: ignore[no-untyped-call]


def to_part(split: SplitTensor) -> Tensor:
    return _ToPart.apply(split)  # type: ignore[no-any-return, no-untyped-call]


def whole_of(split: SplitTensor) -> Tensor:
    """The whole tensor on every rank, in autograd's graph."""
    return split._as_whole(writes=False)


def view_of(split: SplitTensor, result: Any, part: Tensor, take: Callable[[Tensor], Tensor]) -> Any:
    """`result`, computed from `part` of `split`; if it is a view of that, it remembers `split` as its base."""
    if torch._C._is_alias_of(result._part, part):  # type: ignore[attr-defined]  # not in its stubs
        result._origin = split, take
    return result


class _FromPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, kind: type[SplitTensor], layout: DimSharding, axis: int) -> SplitTensor:
        ctx.layout, ctx.axis = layout, axis
        return kind(part, layout, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if isinstance(grad, SplitTensor) and not grad._is_whole:
            if grad._axis == ctx.axis and grad._layout == ctx.layout.of_gradients():
                return to_part(grad), None, None, None
            grad = grad._values()
        return ctx.layout.gradient_of(grad, ctx.axis), None, None, None


class _ToPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, split: SplitTensor) -> Tensor:
        ctx.kind, ctx.layout, ctx.axis = type(split), split._layout, split._axis
        return split._part.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return from_part(ctx.kind, grad, ctx.layout.of_gradients(), ctx.axis)  # type: ignore[no-any-return]


def writes(func: Callable[..., Any]) -> bool:
    """True if a function changes the tensor that it is called on."""
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE


def reads_no_values(func: Callable[..., Any]) -> bool:
    """True if a function reads no elements, only sizes, types, or a place in autograd's graph."""
    return func in _WITHOUT_VALUES or (getattr(func, "__name__", "") in ("__get__", "__set__") and func not in _VIEWS)


def as_tensors() -> AbstractContextManager[Any]:
    """A context in which torch treats split tensors like any tensors."""
    context: AbstractContextManager[Any] = torch._C.DisableTorchFunctionSubclass()
    return context


_aten = torch.ops.aten
_OF_AUTOGRAD = frozenset((_aten.add.Tensor, _aten.detach.default, _aten.clone.default))
_attributes: Any = Tensor
_VIEWS = frozenset(getattr(_attributes, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag", "data"))
_SIZES = ("size", "dim", "stride", "numel", "nelement", "element_size", "get_device", "storage_offset", "is_contiguous")
_PLACE = ("_is_view", "requires_grad_", "retain_grad", "register_hook", "__len__", "__hash__", "backward")
_KINDS = ("is_floating_point", "is_complex", "is_inference", "is_conj", "is_neg")
_WITHOUT_VALUES = frozenset(
    (
        *(getattr(Tensor, name) for name in (*_SIZES, *_PLACE, *_KINDS)),
        *(getattr(torch, name) for name in ("numel", *_KINDS)),
        torch.autograd.backward,
        torch.autograd.grad,
    )
)
_IN_PLACE = frozenset(("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__ipow__", "__imod__"))
MAKE_OTHERS = frozenset((Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor))
"""Functions that take only a tensor's type and device."""
