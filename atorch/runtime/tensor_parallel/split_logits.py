"""Logits of which each rank has some columns, and which are the whole ones to whoever computes with them.

A loss that is known (`split_loss`) is taken of the columns where they are. What leaves the columns alone, such as a
cast or a view of other dims (`keeping`), gives logits that are split again. Everything else gathers first, once, and
from then on these are whole logits like any others: every rank has to do it, as every rank has to gather.

Autograd sees the whole: gradients have its shape, and are split where they come from what is split. A view of split
logits remembers what it is of, so that who writes into it writes there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from atorch.runtime.tensor_parallel import split_loss
from atorch.runtime.tensor_parallel.columns import Columns
from atorch.runtime.tensor_parallel.keeping import Parted, apart, has_parameters


class SplitLogits(Tensor):
    """A tensor of which this rank holds the columns along one dim."""

    _part: Tensor
    _columns: Columns
    _axis: int
    _whole: Tensor | None
    _origin: tuple[SplitLogits, Callable[[Tensor], Tensor]] | None

    @staticmethod
    def __new__(cls, part: Tensor, columns: Columns, axis: int) -> SplitLogits:
        """`part` without its history; the dim `axis` of it is that of the columns."""
        sizes = [columns.total if dim == axis else size for dim, size in enumerate(part.shape)]
        # Where strides step over whole rows, rows are longer by as much.
        strides = [
            stride // columns.count * columns.total if dim != axis and part.stride(axis) <= stride else stride
            for dim, stride in enumerate(part.stride())
        ]
        made: SplitLogits = Tensor._make_wrapper_subclass(
            cls, sizes, strides=strides, dtype=part.dtype, device=part.device
        )
        made._part, made._columns, made._axis = part.detach(), columns, axis
        made._whole = made._origin = None
        return made

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        """Without communication: a process may print what the others do not."""
        if self._is_whole:
            return repr(self._values())
        start, stop = self._columns.start, self._columns.start + self._columns.count
        return f"SplitLogits({self._part}, columns {start} to {stop} of {self._columns.total})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_part"], (self._columns, self._axis)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, sizes: Any, strides: Any) -> SplitLogits:
        return SplitLogits(inner["_part"], *context)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _reads_no_values(func):
            with _as_tensors():
                return func(*args, **kwargs)
        if args and isinstance(args[0], SplitLogits) and not args[0]._is_whole:
            result = _on_part(func, args[0], args[1:], kwargs)
            if result is not NotImplemented:
                return result
        return _on_whole(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has it as a static one
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What autograd does by itself: it adds and keeps gradients."""
        if func in _OF_AUTOGRAD:
            first = next(each for each in args if isinstance(each, SplitLogits))
            parts = [first._same_part(each) if isinstance(each, Tensor) else each for each in args]
            return SplitLogits(func(*parts, **(kwargs or {})), first._columns, first._axis)
        args, kwargs = tree_map_only(SplitLogits, SplitLogits._values, (args, kwargs or {}))
        return func(*args, **kwargs)

    @property
    def _is_whole(self) -> bool:
        """Whether these, or what they are a view of, were gathered."""
        return self._whole is not None or (self._origin is not None and self._origin[0]._is_whole)

    def _same_part(self, other: Tensor) -> Tensor:
        """Of a tensor of this shape the columns that are this rank's, without history."""
        if isinstance(other, SplitLogits) and other._axis == self._axis:
            return other._own()
        return self._columns.take(other._values() if isinstance(other, SplitLogits) else other, self._axis)

    def _own(self) -> Tensor:
        """This rank's columns, as they are now, without history."""
        if self._is_whole:
            self._values()
        return self._part

    def _values(self) -> Tensor:
        """All columns, without history: of a view, a view."""
        if self._whole is None:
            with torch.no_grad():
                if self._origin is None:
                    self._whole = self._columns.join(self._part, self._axis)
                else:
                    base, take = self._origin
                    self._whole = take(base._values())
                self._part = self._columns.take(self._whole, self._axis)  # what is written to one is written to both
        return self._whole

    def _as_whole(self, writes: bool) -> Tensor:
        """All columns, as an ordinary tensor that has this one's place in autograd's graph."""
        if self._origin is not None:
            base, take = self._origin
            if writes or base._was_written:
                return take(base._as_whole(writes))
        self._values()
        with _as_tensors():
            return self.view(self.shape)

    @property
    def _was_written(self) -> bool:
        if self._origin is not None and self._origin[0]._was_written:
            return True
        with _as_tensors():
            return not self.is_inference() and self._version > 0


def split_logits(part: Tensor, columns: Columns) -> Tensor:
    """The logits of which `part` has this rank's columns along its last dim."""
    return _from_part(part.contiguous(), columns, part.dim() - 1)


def _on_part(func: Callable[..., Any], logits: SplitLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function on this rank's columns; NotImplemented where it takes more than that."""
    columns, axis = logits._columns, logits._axis
    if func in _MAKE_OTHERS:
        return func(logits._part, *args, **kwargs)
    if func in _LOSSES:
        return _loss(_LOSSES[func], logits, args, kwargs)
    call = apart(func, Parted(tuple(logits.shape), axis, columns.count), args, kwargs)
    if call is None:
        return NotImplemented
    part = _to_part(logits)
    result = func(part, *call.args, **call.kwargs)
    if result is part:
        return logits
    if not isinstance(result, Tensor):
        return result
    if result.device != part.device:
        return NotImplemented  # where the group may not reach
    split = _from_part(result, columns, call.axis)
    if torch._C._is_alias_of(result, part):  # type: ignore[attr-defined]  # not in its stubs
        split._origin = logits, lambda whole: func(whole, *args, **kwargs)
    return split


def _loss(loss: Callable[..., Any], logits: SplitLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(isinstance(each, SplitLogits) for each in (*args, *kwargs.values())):
        return NotImplemented
    if not has_parameters(loss, logits, logits, 0, *args, **kwargs):
        return NotImplemented
    result = loss(_to_part(logits), logits._columns, logits._axis, *args, **kwargs)
    if loss is not split_loss.log_softmax or result is NotImplemented:
        return result
    return _from_part(result, logits._columns, logits._axis)


def _on_whole(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function on all columns."""
    writes = _writes(func) or "out" in kwargs
    made: dict[int, SplitLogits] = {}

    def whole(logits: SplitLogits) -> Tensor:
        tensor = logits._as_whole(writes)
        made[id(tensor)] = logits
        return tensor

    whole_args, whole_kwargs = tree_map_only(SplitLogits, whole, (args, kwargs))
    result = func(*whole_args, **whole_kwargs)
    return made.get(id(result), result)  # what is given back as it came


def _writes(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE


def _reads_no_values(func: Callable[..., Any]) -> bool:
    """Whether a function asks for no elements: for sizes, types, or a place in autograd's graph."""
    return func in _WITHOUT_VALUES or (getattr(func, "__name__", "") in ("__get__", "__set__") and func not in _VIEWS)


def _as_tensors() -> AbstractContextManager[Any]:
    """Inside, split logits are to torch what any tensor is."""
    context: AbstractContextManager[Any] = torch._C.DisableTorchFunctionSubclass()
    return context


class _FromPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, columns: Columns, axis: int) -> SplitLogits:
        ctx.columns, ctx.axis = columns, axis
        return SplitLogits(part, columns, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if isinstance(grad, SplitLogits) and not grad._is_whole:
            return _to_part(grad), None, None
        return ctx.columns.take(grad, ctx.axis), None, None


class _ToPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: SplitLogits) -> Tensor:
        ctx.columns, ctx.axis = logits._columns, logits._axis
        return logits._part.view_as(logits._part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _from_part(grad, ctx.columns, ctx.axis)


def _from_part(part: Tensor, columns: Columns, axis: int) -> SplitLogits:
    logits: SplitLogits = _FromPart.apply(part, columns, axis)  # type: ignore[no-untyped-call]
    return logits


def _to_part(logits: SplitLogits) -> Tensor:
    part: Tensor = _ToPart.apply(logits)  # type: ignore[no-untyped-call]
    return part


_LOSSES: Mapping[Callable[..., Any], Callable[..., Any]] = {
    F.cross_entropy: split_loss.cross_entropy,
    F.nll_loss: split_loss.nll_loss,
    **dict.fromkeys((torch.logsumexp, Tensor.logsumexp), split_loss.logsumexp),
    **dict.fromkeys((F.log_softmax, torch.log_softmax, Tensor.log_softmax), split_loss.log_softmax),
    **dict.fromkeys((torch.gather, Tensor.gather), split_loss.gather),
}
_aten = torch.ops.aten
_OF_AUTOGRAD = frozenset((_aten.add.Tensor, _aten.detach.default, _aten.clone.default))
_attributes: Any = Tensor
_VIEWS = frozenset(getattr(_attributes, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag", "data"))
_MAKE_OTHERS = frozenset((Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor))
_WITHOUT_VALUES = frozenset(
    (
        Tensor.size,
        Tensor.dim,
        Tensor.stride,
        Tensor.numel,
        Tensor.nelement,
        Tensor.element_size,
        Tensor.get_device,
        Tensor.is_contiguous,
        Tensor.is_floating_point,
        Tensor.is_complex,
        Tensor.is_inference,
        Tensor.is_conj,
        Tensor.is_neg,
        Tensor._is_view,
        Tensor.storage_offset,
        Tensor.requires_grad_,
        Tensor.retain_grad,
        Tensor.register_hook,
        Tensor.__len__,
        Tensor.__hash__,
        Tensor.backward,
        torch.autograd.backward,
        torch.autograd.grad,
        torch.numel,
        torch.is_floating_point,
        torch.is_complex,
        torch.is_inference,
        torch.is_conj,
        torch.is_neg,
    )
)
_IN_PLACE = frozenset(("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__ipow__", "__imod__"))
