"""Logits that are computed by chunks when a loss is taken of them, so that they never exist together.

The head, a linear layer, returns `LazyLogits`: row numbers of hidden states, and the weight to multiply them with.
Casts, scaling, capping, and views of tokens return lazy logits again. Cross entropies and log-sum-exps run chunk by
chunk, with torch's own functions. Everything else gets full logits, computed once; a log line names the function.

Autograd sees logits of the full shape. Their gradient is a `LazyGradient`, from which the head computes those of its
operands (`logit_losses`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from atorch.cost.profile import LEAST_ROWS, LOGIT_CHUNKS
from atorch.logs import log_once
from atorch.model.wrapper import override
from atorch.runtime.gradients.backward import refuse_second_order
from atorch.runtime.loss.logit_losses import (
    NUMBERS,
    Head,
    LazyGradient,
    Like,
    LogitProduct,
    Needs,
    terms_of,
    versions_of,
)
from atorch.runtime.tensor_parallel.sharded_activation import (
    MAKE_OTHERS,
    PartialTensor,
    TrackedDim,
    strides_of_whole,
)
from atorch.runtime.tensor_parallel.sharding_rules import CASTS, SCALES, applied, local_call

_WIDTH = 2
"""Size of the class dim of `LazyLogits._rows`: more than 1, since the stride of a dim of size 1 means nothing."""

Apply = Callable[[Tensor], Tensor]


class Origin(NamedTuple):
    """The logits that others were derived from, and the function that derives them."""

    logits: LazyLogits
    make: Apply
    is_view: bool


class LazyLogits(PartialTensor):
    """Rows of a head's logits, computed when they are first read."""

    _head: Head
    _rows: Tensor  # row numbers of the head, in the logits' shape except for the class dim
    _axis: int  # the class dim
    _ops: tuple[Apply, ...]  # applied in order to the rows of a chunk
    _origin: Origin | None
    _whole: Tensor | None
    _written: bool
    _reading = frozenset((Tensor.backward, torch.autograd.backward))

    @staticmethod
    def __new__(
        cls, head: Head, rows: Tensor, axis: int, dtype: torch.dtype, ops: tuple[Apply, ...] = ()
    ) -> LazyLogits:
        classes = head.product.weight.shape[0]
        sizes = [classes if dim == axis else size for dim, size in enumerate(rows.shape)]
        strides = strides_of_whole(rows, axis, classes)
        device = head.product.hidden.device
        logits: LazyLogits = Tensor._make_wrapper_subclass(cls, sizes, strides=strides, dtype=dtype, device=device)
        logits._head, logits._rows, logits._axis, logits._ops = head, rows, axis, ops
        logits._origin = logits._whole = None
        logits._written = False
        return logits

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        if self._is_whole:
            return repr(self._as_whole())
        return f"LazyLogits({tuple(self.shape)}, {self.dtype}, computed when they are read)"

    @classmethod
    def on_part(cls, func: Callable[..., Any], tensor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _by_chunks(func, tensor, args, kwargs)

    def read(self, func: Callable[..., Any], is_written: bool) -> Tensor:
        if not self._is_whole:
            log_once(
                f"cross_entropy: {getattr(func, '__name__', func)} asks for the logits themselves, which are computed "
                "whole; cross entropies, log-sum-exps and argmax are not in need of them"
            )
        tensor = self._as_whole()
        if is_written:
            self._mark_written()
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Compute logits for operations that bypass `__torch_function__`."""
        args, kwargs = tree_map_only(LazyLogits, lambda logits: logits._as_whole().detach(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_rows"], (self._head, self._axis, self.dtype, self._ops)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, sizes: Any, strides: Any) -> LazyLogits:
        head, *more = context
        return cls(head, inner["_rows"], *more)

    @property
    def _is_whole(self) -> bool:  # type: ignore[override]
        """True if these logits, or those that they are a view of, were computed."""
        origin = self._origin
        return self._whole is not None or (origin is not None and origin.is_view and origin.logits._is_whole)

    def _as_whole(self) -> Tensor:
        """All logits as an ordinary tensor, with their place in autograd's graph."""
        if self._whole is None:
            with torch.set_grad_enabled(self.requires_grad):  # the first reader may be without gradients
                self._whole = self._computed()
        return self._whole

    def _computed(self) -> Tensor:
        if self._origin is None:
            return _Compute.apply(self)  # type: ignore[no-any-return, no-untyped-call]
        logits, make, is_view = self._origin
        # A copy made before an in-place write keeps the values from before it.
        source = logits._as_whole() if is_view or not logits._was_written else logits._computed()
        return make(source)

    @property
    def _was_written(self) -> bool:
        origin = self._origin
        return self._written or (origin is not None and origin.is_view and origin.logits._was_written)

    def _mark_written(self) -> None:
        self._written = True
        if self._origin is not None and self._origin.is_view:
            self._origin.logits._mark_written()


def lazy_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk: int) -> Tensor:
    """`F.linear(hidden, weight, bias)`, with at most `chunk` rows in memory at once while losses are taken."""
    return _Product.apply(hidden, weight, bias, chunk)  # type: ignore[no-any-return, no-untyped-call]


class _Product(torch.autograd.Function):
    """The head: lazy logits in forward, and the gradients of its operands in backward."""

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
    @staticmethod
    def forward(ctx: Any, logits: LazyLogits) -> Tensor:
        rows = logits._head.read().logits(slice(None))
        whole: Tensor = torch.ops.aten._unsafe_view(rows, logits.shape)  # no view for autograd: writes are allowed
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return LazyGradient(Like.of(grad), terms_of(grad))


class _Derive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: LazyLogits, wrap: Callable[[], LazyLogits], make: Apply) -> LazyLogits:
        ctx.of, ctx.make = logits.detach(), make
        return wrap()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if isinstance(grad, LazyGradient):
            return LazyGradient(Like.of(ctx.of), grad._terms), None, None
        with torch.enable_grad():  # a dense gradient, from a function that read all logits
            source = ctx.of._as_whole().detach().requires_grad_()
            (dense,) = torch.autograd.grad(ctx.make(source), source, grad)
        return dense, None, None


def _by_chunks(func: Callable[..., Any], logits: LazyLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function that works on chunks; NotImplemented if it needs all logits."""
    if any(isinstance(argument, LazyLogits) for argument in (*args, *kwargs.values())):
        return NotImplemented
    if func in NUMBERS:
        return applied(NUMBERS[func], logits, *args, **kwargs)
    if func in MAKE_OTHERS:
        return func(_probe(logits), *args, **kwargs)
    if func in _LOG_SOFTMAX:
        return applied(_log_softmax, logits, *args, **kwargs)
    call = local_call(func, tuple(logits.shape), _Classes(), logits._axis, args, kwargs)
    if call is None:
        return NotImplemented

    def make(tensor: Tensor) -> Any:
        return func(tensor, *args, **kwargs)

    if func in _OF_ELEMENTS:
        result = make(probe := _probe(logits))
        if result is probe:
            return logits
        if not isinstance(result, Tensor):
            return result
        return NotImplemented if result.device != logits.device else _with_op(logits, make, result.dtype)
    rows = call.make(logits._rows)
    if rows is logits._rows:
        return logits
    is_view = torch._C._is_alias_of(rows, logits._rows)  # type: ignore[attr-defined]  # not in its stubs
    keeps_history = func not in (Tensor.detach, torch.detach)
    return _derived(logits, make, is_view, keeps_history, rows=rows, axis=call.axis)


class _Classes(TrackedDim):
    """The class dim of `LazyLogits._rows`."""

    part_size = _WIDTH


def _probe(logits: LazyLogits) -> Tensor:
    return torch.empty(1, dtype=logits.dtype, device=logits.device)


def _log_softmax(logits: LazyLogits, dim: int, dtype: torch.dtype | None = None, _stacklevel: int = 3) -> Any:
    if not isinstance(dim, int) or dim % logits.dim() != logits._axis:
        return NotImplemented
    kind = logits.device.type
    is_autocast, cast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def at(axis: int) -> Apply:
        def make(tensor: Tensor) -> Tensor:
            with torch.autocast(kind, cast, enabled=is_autocast):
                return F.log_softmax(tensor, axis, dtype=dtype)

        return make

    return _with_op(logits, at(-1), at(-1)(_probe(logits)).dtype, whole=at(logits._axis))


def _with_op(logits: LazyLogits, op: Apply, dtype: torch.dtype, whole: Apply | None = None) -> LazyLogits:
    """The same rows with one more operation `op` on each; `whole`: its version for full logits, if it differs."""
    return _derived(logits, whole or op, dtype=dtype, ops=(*logits._ops, op))


def _derived(
    logits: LazyLogits, make: Apply, is_view: bool = False, keeps_history: bool = True, **changes: Any
) -> LazyLogits:
    fields = {"rows": logits._rows, "axis": logits._axis, "dtype": logits.dtype, "ops": logits._ops, **changes}

    def wrap() -> LazyLogits:
        return LazyLogits(logits._head, **fields)

    result: LazyLogits = _Derive.apply(logits, wrap, make) if keeps_history else wrap()  # type: ignore[no-untyped-call]
    result._origin = Origin(logits, make, is_view)
    return result


def chunk_logits(head: nn.Linear, chunk: int | None = None, *, without_gradients: bool = True) -> None:
    """Let `head` return lazy logits, in place.

    chunk: rows whose logits exist at once; None: a sixteenth of them, at least 128. Fewer rows are computed at once.
    without_gradients: also where no gradient is computed. Set False if such a forward pass frees the weight.
    """
    override(head, "forward", _lazy, chunk, without_gradients)


def _lazy(original: Callable[..., Tensor], chunk: int | None, without_gradients: bool) -> Callable[..., Tensor]:
    def forward(self: Any, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or _is_special(self, input):
            return original(self, input)
        rows = input.numel() // max(1, input.shape[-1])
        max_rows = chunk or max(LEAST_ROWS, -(-rows // LOGIT_CHUNKS))
        if rows <= max_rows or not (without_gradients or torch.is_grad_enabled()):
            return original(self, input)
        return lazy_logits(input, self.weight, self.bias, max_rows)

    return forward


def _is_special(head: Any, input: Tensor) -> bool:
    """True if an operand is a tensor subclass, or torch traces or transforms the call."""
    operands = (input, head.weight, head.bias)
    is_wrapper = any(operand is not None and is_traceable_wrapper_subclass(operand) for operand in operands)
    return (
        is_wrapper
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


_LOG_SOFTMAX = frozenset((F.log_softmax, torch.log_softmax, Tensor.log_softmax))
_OF_ROWS = frozenset((Tensor.contiguous, Tensor.clone, torch.clone, Tensor.detach, torch.detach))
_OF_ELEMENTS: frozenset[Callable[..., Any]] = CASTS.difference(_OF_ROWS).union(SCALES, (Tensor.tanh, torch.tanh))
