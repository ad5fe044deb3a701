"""Logits that are computed by chunks, when a loss is taken of them, so that they never exist together.

The head, a linear layer, gives `LazyLogits`: which rows of hidden states times which weight. Casts, scaling, capping,
and views of tokens give lazy logits again. Cross entropies and log-sum-exps are taken chunk by chunk, by torch's own
functions. Everything else gets true logits, computed then and once; what asked for them is told.

Autograd sees logits of the whole shape. Their gradient is a `LazyGradient`, from which the head makes those of its
operands: a loss that is one number of all rows has computed them with itself, as no loss scale can be known to
underflow; others let the head compute each chunk's logits again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from atorch.logs import say_once
from atorch.model.method_override import override
from atorch.runtime.gradients.no_double_backward import refuse_second_order
from atorch.runtime.loss.lazy_gradient import LazyGradient, Like, terms_of
from atorch.runtime.loss.logit_chunks import Head, LogitProduct, Needs, versions_of
from atorch.runtime.loss.logit_losses import NUMBERS
from atorch.runtime.tensor_parallel.sharded_activation import MAKE_OTHERS, as_tensors, reads_no_values, writes
from atorch.runtime.tensor_parallel.sharding_rules import CASTS, Parted, apart, has_parameters

_WIDTH = 2
"""Of the dim of classes in the numbers of rows that stand for logits: more than 1, whose strides mean nothing."""

Apply = Callable[[Tensor], Tensor]


class Origin(NamedTuple):
    """The logits that others were made of, and how."""

    logits: LazyLogits
    make: Apply
    is_view: bool


class LazyLogits(Tensor):
    """Rows of a head's logits, which are not computed until they are read."""

    _head: Head
    _rows: Tensor  # the number of each row among the head's, in the shape of the logits, but for the dim of classes
    _axis: int  # the dim of classes
    _ops: tuple[Apply, ...]  # what is done to every element
    _origin: Origin | None
    _whole: Tensor | None
    _written: bool

    @staticmethod
    def __new__(
        cls, head: Head, rows: Tensor, axis: int, dtype: torch.dtype, ops: tuple[Apply, ...] = ()
    ) -> LazyLogits:
        classes = head.product.weight.shape[0]
        sizes = [classes if dim == axis else size for dim, size in enumerate(rows.shape)]
        strides = [
            stride // _WIDTH * classes if dim != axis and rows.stride(axis) <= stride else stride
            for dim, stride in enumerate(rows.stride())
        ]
        device = head.product.hidden.device
        made: LazyLogits = Tensor._make_wrapper_subclass(cls, sizes, strides=strides, dtype=dtype, device=device)
        made._head, made._rows, made._axis, made._ops = head, rows, axis, ops
        made._origin = made._whole = None
        made._written = False
        return made

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        """Without computing them."""
        if self._is_whole:
            return repr(self._as_whole())
        return f"LazyLogits({tuple(self.shape)}, {self.dtype}, computed when they are read)"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if reads_no_values(func) and func not in _BACKWARDS:
            with as_tensors():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, LazyLogits) and not first._is_whole:
            result = _by_chunks(func, first, args[1:], kwargs)
            if result is not NotImplemented:
                return result
        return _on_whole(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has it as a static one
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What comes from where no function is seen."""
        args, kwargs = tree_map_only(LazyLogits, lambda each: each._as_whole().detach(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_rows"], (self._head, self._axis, self.dtype, self._ops)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, sizes: Any, strides: Any) -> LazyLogits:
        head, *more = context
        return cls(head, inner["_rows"], *more)

    @property
    def _is_whole(self) -> bool:
        """True if these, or what they are a view of, were computed."""
        origin = self._origin
        return self._whole is not None or (origin is not None and origin.is_view and origin.logits._is_whole)

    def _as_whole(self) -> Tensor:
        """All of them, as an ordinary tensor, with their place in autograd's graph."""
        if self._whole is None:
            with torch.set_grad_enabled(self.requires_grad):  # whoever reads them first, others may train
                self._whole = self._computed()
        return self._whole

    def _computed(self) -> Tensor:
        if self._origin is None:
            whole: Tensor = _Compute.apply(self)  # type: ignore[no-untyped-call]
            return whole
        logits, make, is_view = self._origin
        # What was copied before something was written has what was there before.
        source = logits._as_whole() if is_view or not logits._was_written else logits._computed()
        return make(source)

    @property
    def _was_written(self) -> bool:
        origin = self._origin
        return self._written or (origin is not None and origin.is_view and origin.logits._was_written)

    def _tell_written(self) -> None:
        self._written = True
        if self._origin is not None and self._origin.is_view:
            self._origin.logits._tell_written()


def lazy_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk: int) -> Tensor:
    """`F.linear(hidden, weight, bias)`, of which no more than `chunk` rows exist at once while losses are taken."""
    logits: Tensor = _Product.apply(hidden, weight, bias, chunk)  # type: ignore[no-untyped-call]
    return logits


class _Product(torch.autograd.Function):
    """The head: logits that are not there, and the gradients of what they are computed of."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk: int) -> LazyLogits:
        ctx.save_for_backward(hidden, weight, bias)
        kind = hidden.device.type
        is_autocast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if is_autocast else hidden.dtype
        product = _detached(hidden, weight, bias, dtype, chunk)
        needs = Needs(*ctx.needs_input_grad[:3])
        ctx.dtype, ctx.chunk, ctx.needs = dtype, chunk, needs
        rows = torch.arange(product.hidden.shape[0], device=hidden.device).view(*hidden.shape[:-1], 1)
        rows = rows.repeat(*[1] * (hidden.dim() - 1), _WIDTH)
        return LazyLogits(Head(product, needs, versions_of(product)), rows, hidden.dim() - 1, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("cross_entropy, which drops logits")
        hidden, weight, bias = ctx.saved_tensors
        product = _detached(hidden, weight, bias, ctx.dtype, ctx.chunk)
        into = None
        for term in terms_of(grad):
            into = term(product, ctx.needs, into)
        assert into is not None, "a gradient has terms"
        of_bias = None if into.bias is None or bias is None else into.bias.to(bias.dtype)
        of_hidden = None if into.hidden is None else into.hidden.view(hidden.shape)
        return of_hidden, None if into.weight is None else into.weight.to(weight.dtype), of_bias, None


def _detached(hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, chunk: int) -> LogitProduct:
    rows = hidden.detach().reshape(-1, hidden.shape[-1])
    return LogitProduct(rows, weight.detach(), None if bias is None else bias.detach(), dtype, chunk)


class _Compute(torch.autograd.Function):
    """A head's logits, all of them."""

    @staticmethod
    def forward(ctx: Any, logits: LazyLogits) -> Tensor:
        rows = logits._head.read().logits(slice(None))
        whole: Tensor = torch.ops.aten._unsafe_view(rows, logits.shape)  # no view to autograd: it may be written into
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return LazyGradient(Like.of(grad), terms_of(grad))


class _Derive(torch.autograd.Function):
    """Logits made of others'."""

    @staticmethod
    def forward(ctx: Any, logits: LazyLogits, made: Callable[[], LazyLogits], make: Apply) -> LazyLogits:
        ctx.of, ctx.make = logits.detach(), make
        return made()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if isinstance(grad, LazyGradient):
            return LazyGradient(Like.of(ctx.of), grad._terms), None, None
        with torch.enable_grad():  # one that was computed of all logits, by whoever has parts of them
            source = ctx.of._as_whole().detach().requires_grad_()
            (dense,) = torch.autograd.grad(ctx.make(source), source, grad)
        return dense, None, None


def _by_chunks(func: Callable[..., Any], logits: LazyLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function that is known to work on chunks; NotImplemented where it takes all logits."""
    if any(isinstance(each, LazyLogits) for each in (*args, *kwargs.values())):
        return NotImplemented
    if func in NUMBERS:
        number = NUMBERS[func]
        return number(logits, *args, **kwargs) if has_parameters(number, logits, *args, **kwargs) else NotImplemented
    if func in MAKE_OTHERS:
        return func(_probe(logits), *args, **kwargs)
    if func in _LOG_SOFTMAX:
        return (
            _log_softmax(logits, *args, **kwargs)
            if has_parameters(_log_softmax, logits, *args, **kwargs)
            else NotImplemented
        )
    call = apart(func, Parted(tuple(logits.shape), logits._axis, _WIDTH), args, kwargs)
    if call is None:
        return NotImplemented
    make = partial(_called, func, args, kwargs)
    if func in _OF_ELEMENTS:
        result = make(probe := _probe(logits))
        if result is probe:
            return logits
        if not isinstance(result, Tensor):
            return result
        return NotImplemented if result.device != logits.device else _with_op(logits, make, result.dtype)
    rows = func(logits._rows, *call.args, **call.kwargs)
    if rows is logits._rows:
        return logits
    is_view = torch._C._is_alias_of(rows, logits._rows)  # type: ignore[attr-defined]  # not in its stubs
    keeps_history = func not in (Tensor.detach, torch.detach)
    return _derived(logits, make, is_view, keeps_history, rows=rows, axis=call.axis)


def _called(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensor: Tensor) -> Any:
    return func(tensor, *args, **kwargs)


def _probe(logits: LazyLogits) -> Tensor:
    return torch.empty(1, dtype=logits.dtype, device=logits.device)


def _log_softmax(logits: LazyLogits, dim: int, dtype: torch.dtype | None = None, _stacklevel: int = 3) -> Any:
    if not isinstance(dim, int) or dim % logits.dim() != logits._axis:
        return NotImplemented
    kind = logits.device.type
    is_autocast, cast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def at(place: int) -> Apply:
        def make(tensor: Tensor) -> Tensor:
            with torch.autocast(kind, cast, enabled=is_autocast):
                return F.log_softmax(tensor, place, dtype=dtype)

        return make

    return _with_op(logits, at(-1), at(-1)(_probe(logits)).dtype, whole=at(logits._axis))


def _with_op(logits: LazyLogits, op: Apply, dtype: torch.dtype, whole: Apply | None = None) -> LazyLogits:
    """The same rows, with one more operation on what each row has; `whole`: on all of them, if it is another."""
    return _derived(logits, whole or op, dtype=dtype, ops=(*logits._ops, op))


def _derived(
    logits: LazyLogits, make: Apply, is_view: bool = False, keeps_history: bool = True, **changes: Any
) -> LazyLogits:
    fields = {"rows": logits._rows, "axis": logits._axis, "dtype": logits.dtype, "ops": logits._ops, **changes}

    def made() -> LazyLogits:
        return LazyLogits(logits._head, **fields)

    result: LazyLogits = _Derive.apply(logits, made, make) if keeps_history else made()  # type: ignore[no-untyped-call]
    result._origin = Origin(logits, make, is_view)
    return result


def _on_whole(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function on all logits."""
    is_written = writes(func) or "out" in kwargs
    made: dict[int, LazyLogits] = {}

    def whole(logits: LazyLogits) -> Tensor:
        if not logits._is_whole:
            say_once(
                f"cross_entropy: {getattr(func, '__name__', func)} asks for the logits themselves, which are computed "
                "whole; cross entropies, log-sum-exps and argmax are not in need of them"
            )
        tensor = logits._as_whole()
        if is_written:
            logits._tell_written()
        made[id(tensor)] = logits
        return tensor

    whole_args, whole_kwargs = tree_map_only(LazyLogits, whole, (args, kwargs))
    result = func(*whole_args, **whole_kwargs)
    return made.get(id(result), result)  # what is given back as it came


def chunk_logits(head: nn.Linear, chunk: int | None = None, *, without_gradients: bool = True) -> None:
    """Let `head` give lazy logits, in place.

    chunk: rows whose logits exist at once; None for a sixteenth of them, 128 at least. Fewer rows are computed at once.
    without_gradients: also where no gradient is computed. Not where its weight is gone after such a forward pass.
    """
    override(head, "forward", _lazy, chunk, without_gradients)


def _lazy(theirs: Callable[..., Tensor], chunk: int | None, without_gradients: bool) -> Callable[..., Tensor]:
    def forward(self: Any, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or _is_special(self, input):
            return theirs(self, input)
        rows = input.numel() // max(1, input.shape[-1])
        most = chunk or max(LEAST, -(-rows // SHARES))
        if rows <= most or not (without_gradients or torch.is_grad_enabled()):
            return theirs(self, input)
        return lazy_logits(input, self.weight, self.bias, most)

    return forward


def _is_special(head: Any, input: Tensor) -> bool:
    """True if a head's operands are no ordinary tensors, or a function is differentiated by torch.func."""
    kinds = (input, head.weight, head.bias)
    is_wrapper = any(each is not None and is_traceable_wrapper_subclass(each) for each in kinds)
    return (
        is_wrapper
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


SHARES = 16
"""A chunk is so small a share of all rows,"""
LEAST = 128
"""and has so many rows at least, that products stay fast."""
_BACKWARDS = frozenset((Tensor.backward, torch.autograd.backward))
_LOG_SOFTMAX = frozenset((F.log_softmax, torch.log_softmax, Tensor.log_softmax))
_OF_ROWS = frozenset((Tensor.contiguous, Tensor.clone, torch.clone, Tensor.detach, torch.detach))
_SCALES = (Tensor.mul, torch.mul, Tensor.div, torch.div, Tensor.true_divide, Tensor.tanh, torch.tanh)
_OF_ELEMENTS: frozenset[Callable[..., Any]] = CASTS.difference(_OF_ROWS).union(_SCALES)
