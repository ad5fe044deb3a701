"""Access to parameters of a sharded model. Outside of its passes each acts as the optimizer's parameter.

FSDP2 leaves the parameters that it keeps gathered for backward in the modules: copies, maybe in 16 bits. Until backward
begins such a copy delegates to its sharded parameter: it has that one's gradient, and reads and writes go there. Only
operations with plain tensors use the copy, as `F.linear(hidden, model.head.weight)`: their gradients add to those of
forward.

Reading a number that was computed from sharded parameters or gradients, such as a norm, is collective. All ranks must
do it, and get the global value. Added to a loss it becomes a plain number. Other operations that would mix shards and
plain tensors raise. In forward, factories make plain tensors of a parameter that is still sharded, and reads raise.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map

from atorch.errors import ArgumentError
from atorch.model.pytree import tensors_in
from atorch.runtime.data_parallel.collective_order import CollectiveEvent
from atorch.runtime.fsdp.groups import groups_of, sharded_in, show_sharded
from atorch.runtime.gradients.backward import refuse_second_order

_TENSOR: Any = Tensor
READING = frozenset(("item", "tolist", "numpy", "is_nonzero", "equal", "allclose")) | {
    f"__{name}__" for name in ("array", "bool", "int", "float", "complex", "index", "format", "contains")
}
"""Functions that return no tensor, and would compute it from local elements only."""
_OF_SOME = frozenset(("max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "median")) | {
    "norm", "vector_norm", "_foreach_norm"
}  # fmt: skip
"""Reductions that may fail without elements, as in the empty shards of ranks beyond the last row."""
READS = CollectiveEvent("reads what is sharded", is_compared=True)
FACTORIES = ("new", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
_LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like")
_MAKING = frozenset([*(getattr(_TENSOR, name) for name in FACTORIES), *(getattr(torch, name) for name in _LIKE)])
_FLATTENING = frozenset(getattr(_TENSOR, name) for name in ("flatten", "ravel", "reshape", "view", "view_as"))


@dataclass(eq=False)
class ForwardPhase:
    """The phase of a model, which its parameters share."""

    is_running: bool = False


class ModelShard(DTensor):
    """A sharded parameter, its gradient, or a result computed from them."""

    __slots__ = ()
    phase: ForwardPhase | None = None
    """The model's phase, for a parameter and for results that forward computes from it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._as_ordinary(Tensor.__deepcopy__, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._as_ordinary(Tensor.__reduce_ex__, protocol)

    def _as_ordinary(self, method: Any, *args: Any) -> Any:
        kind, attributes = type(self), self.__dict__
        self.__class__ = DTensor  # type: ignore[assignment]
        self.__dict__ = {name: value for name, value in attributes.items() if name not in ("meet", "phase")}
        try:
            return method(self, *args)
        finally:
            self.__class__, self.__dict__ = kind, attributes


class _Delegating:
    """Base of gathered parameters that delegate to their sharded ones."""

    __slots__ = ()
    sharded: Callable[[], Any]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.sharded().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.sharded().__reduce_ex__(protocol)


class _DelegatingParameter(_Delegating, nn.Parameter):
    """A gathered parameter."""

    __slots__ = ()


class _DelegatingShard(_Delegating, DTensor):
    """A gathered parameter under tensor parallelism: the local part, itself sharded by FSDP."""

    __slots__ = ()


def step_as_ordinary(optim: Any) -> Any:
    """Make sharded parameters ordinary DTensors in steps of `optim`, for speed: steps mix no plain tensors in."""
    outside: list[Any] = []

    def before(*_: Any) -> None:
        outside[:] = [param for group in optim.param_groups for param in group["params"] if type(param) is ModelShard]
        for parameter in outside:
            parameter.__class__ = DTensor
            if isinstance(parameter.grad, ModelShard):
                parameter.grad.__class__ = DTensor  # type: ignore[assignment]

    def after(*_: Any) -> None:
        for parameter in outside:
            if type(parameter) is DTensor:
                parameter.__class__ = ModelShard
        outside.clear()

    if isinstance(optim, torch.optim.Optimizer):
        optim.register_step_pre_hook(before)
        optim.register_step_post_hook(after)
    return optim


_DELEGATING: Mapping[type[Any], type[Any]] = {nn.Parameter: _DelegatingParameter, DTensor: _DelegatingShard}


def delegate_to_sharded(root: nn.Module) -> None:
    """Make gathered parameters of `root` delegate to the sharded ones outside forward and backward."""
    between = _OutsideForward(root)
    root.register_forward_pre_hook(lambda *_: between.end(), prepend=True)
    for module in between.modules:
        module.register_forward_hook(between.watch, prepend=True)  # before FSDP2's, so that backward calls it first
    root.register_forward_hook(lambda *_: between.begin(), always_call=True)


class _OutsideForward:
    """Switches gathered parameters, freed ones too, between themselves and delegates: an optimizer may hold one."""

    def __init__(self, root: nn.Module) -> None:
        self._root, self.modules = root, sharded_in(root)
        self._groups = [group for module in self.modules for group in groups_of(module)]
        self._delegating: list[Any] = []
        self._replaced: list[Any] = []  # FSDP2's parameters, gathered as tensors that cannot delegate
        for module in self.modules:
            module.unshard = partial(self._unshard, module.unshard)

    def begin(self) -> None:
        """Start delegating, after forward and backward."""
        self.end()
        for group in self._groups:
            for fsdp_param in group.fsdp_params:
                self._put(fsdp_param, vars(fsdp_param).get("_unsharded_param"), group.is_unsharded)
            if not (group.is_sharded or group.is_unsharded):  # but sharded over fewer ranks
                show_sharded(group)

    def _put(self, fsdp_param: Any, gathered: Any, is_unsharded: bool) -> None:
        if (kind := _DELEGATING.get(type(gathered))) is not None:  # else a fake tensor, or another subclass
            gathered.sharded = weakref.ref(fsdp_param.sharded_param)
            gathered.__class__ = kind
            self._delegating.append(gathered)
        elif is_unsharded and hasattr(gathered, "to_original_precision"):  # in 8 bits
            fsdp_param._setattr_on_modules(fsdp_param.sharded_param)
            self._replaced.append(fsdp_param)

    def end(self) -> None:
        """Stop delegating, before forward and backward."""
        for gathered in self._delegating:
            sharded = gathered.sharded()
            gathered.__class__ = DTensor if isinstance(gathered, _DelegatingShard) else nn.Parameter
            if sharded is not None and gathered.requires_grad != sharded.requires_grad:
                gathered.requires_grad_(sharded.requires_grad)
        self._delegating.clear()
        for fsdp_param in self._replaced:
            if fsdp_param.sharded_state == fsdp_param.sharded_state.UNSHARDED:
                fsdp_param._setattr_on_modules(fsdp_param.unsharded_param)
        self._replaced.clear()

    def _unshard(self, unshard: Any, async_op: bool = False) -> Any:
        """FSDP2's `unshard`, after which a user expects the gathered parameters."""
        self.end()
        return unshard(async_op)

    def watch(self, module: nn.Module, args: Any, output: Any) -> None:
        """Copy changes of `requires_grad` in forward to the shards; hook the outputs, to see backward begin."""
        for group in self._groups if module is self._root else groups_of(module):
            if group.is_unsharded:
                for fsdp_param in group.fsdp_params:
                    if fsdp_param.unsharded_param.requires_grad != fsdp_param.sharded_param.requires_grad:
                        fsdp_param.sharded_param.requires_grad_(fsdp_param.unsharded_param.requires_grad)

        for tensor in tensors_in(output) if torch.is_grad_enabled() else ():
            if tensor.requires_grad:
                tensor.register_hook(self._begin_backward)

    def _begin_backward(self, _: Tensor) -> None:
        refuse_second_order("fsdp and zero2, which free in backward what forward has gathered")
        if self._delegating or self._replaced:
            self.end()
            torch.autograd.Variable._execution_engine.queue_callback(self.begin)


def run(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        if torch._C._current_graph_task_id() != -1:  # in backward: FSDP2's own calls, or recomputation of forward
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return as_shard(args[0], func(*map(_sharded, args)), _running_phase(args[0]))
        if name == "__set__" and args[1] is None:  # as optimizers clear gradients
            return func(_sharded(args[0]), None)
        leaves = tree_leaves((args, kwargs))
        first = next((_sharded(leaf) for leaf in leaves if isinstance(leaf, (ModelShard, _Delegating))), None)
        if first is None:  # it is in a container that pytree does not open
            return func(*args, **kwargs)
        if name in vars(first):  # a factory: `make_plain_tensors`
            return vars(first)[name](*args[1:], **kwargs)
        if _running_phase(first) is not None:
            return _run_in_forward(func, first, args, kwargs)
        plain = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, (DTensor, _Delegating))]
        changes = writes(name, kwargs)
        into = next(iter((*args, *kwargs.values()))) if changes else None  # torch.nn.init gives keywords
        if name in READING or (isinstance(into, Tensor) and not isinstance(into, (DTensor, _Delegating))):
            return func(*tree_map(partial(_read_whole, first), args), **tree_map(partial(_read_whole, first), kwargs))
        joins = not changes and any(tensor.dim() or tensor.requires_grad for tensor in plain)
        if joins and func is torch.autograd.grad:
            raise ArgumentError(
                f"torch.autograd.grad was asked for the gradient of {first.path}, which is sharded: its gradient comes "
                "to the shards only by loss.backward(); call that, and read parameter.grad"
            )
        if isinstance(into, ModelShard):
            _settle(into)
        args, kwargs = tree_map(_joined if joins else partial(_sharded, into=_sharded(into)), (args, kwargs))
        if name.removeprefix("linalg_") in _OF_SOME:
            args = tree_map(partial(_with_elements, first), args)
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            _explain(error, func, first.path, tree_leaves((args, kwargs)))
            raise
        return result if name.endswith("_like") else tree_map(partial(as_shard, first), result)


def _running_phase(value: Any) -> ForwardPhase | None:
    phase = getattr(value, "phase", None)
    return phase if phase is not None and phase.is_running else None


def _run_in_forward(func: Any, first: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Make factories return plain tensors, and refuse reads of values; run all other functions as usual."""
    if func in _MAKING and args[0] is first:
        return func(torch.empty((), dtype=first.dtype, device=first.device).expand(first.shape), *args[1:], **kwargs)
    if getattr(func, "__name__", "") in READING and args[0] is first:
        raise _read_while_sharded(first.path)
    try:
        result = func(*args, **kwargs)
    except RuntimeError as error:
        if not all(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)):
            raise _read_while_sharded(first.path) from error
        raise
    return tree_map(partial(as_shard, first, phase=first.phase), result)


def _read_while_sharded(path: str) -> ArgumentError:
    return ArgumentError(
        f"{path} is sharded where it is read: a module is gathered for its own forward, and another one reads it. Call "
        "the module that holds it, gather both in one by atorch_wrap_cls (their common parent), or keep the parameter "
        f"whole: atorch_ignored_cls=({path!r},)"
    )


def writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    """True if a function changes its arguments in place: `add_`, `__iadd__`, `__setitem__`, `out=`."""
    is_operator = name.startswith("__") and name.endswith("__")
    return name[2:5] in ("set", "del") or name[2] == "i" if is_operator else name.endswith("_") or "out" in kwargs


def _sharded(value: Any, into: Any = None) -> Any:
    value = value.sharded() if isinstance(value, _Delegating) else value
    if isinstance(into, DTensor) and isinstance(value, DTensor) and value.shape == into.shape:
        return value if value.placements == into.placements else value.redistribute(placements=into.placements)
    return value


def _read_whole(source: Any, value: Any) -> Any:
    """The full tensor. Collective: all ranks call it."""
    value = _sharded(value)
    if not isinstance(value, DTensor):
        return value
    if not all(placement.is_replicate() for placement in value.placements):
        _meet(source)
    return DTensor.full_tensor(value.detach())  # type: ignore[arg-type]


def _meet(source: Any) -> None:
    if source.meet is not None:
        source.meet(READS)


def _with_elements(source: Any, value: Any) -> Any:
    """The value, replicated where some ranks would have empty shards."""
    if isinstance(value, DTensor) and value.dim() and value.shape[0] < value.device_mesh.size():
        _meet(source)
        return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
    return value


def _settle(value: Any) -> None:
    """Reduce a partial sum or norm, so that it can be written in place."""
    if any(placement.is_partial() for placement in value.placements):
        _meet(value)
        settled = value.redistribute(placements=[Replicate() if e.is_partial() else e for e in value.placements])
        value._local_tensor, value._spec = settled._local_tensor, settled._spec


def _joined(value: Any) -> Any:
    """The value for operations with plain tensors: a gathered parameter itself, the global value of a number."""
    if isinstance(value, _DelegatingParameter) and not value.untyped_storage().size():  # it has been freed
        return value.sharded()
    if not isinstance(value, ModelShard) or value.dim():
        return value
    whole = value.full_tensor()
    return _ImmediateBackward.apply(whole.detach().requires_grad_(), [whole]) if whole.requires_grad else whole  # type: ignore[no-untyped-call]


class _ImmediateBackward(torch.autograd.Function):
    """Runs a number's backward at once, before FSDP2 writes gradients on streams that autograd does not wait for."""

    @staticmethod
    def forward(ctx: Any, number: Tensor, whole: list[Tensor]) -> Tensor:
        ctx.whole = whole
        return number.view_as(number)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        torch.autograd.backward(ctx.whole, [gradient], retain_graph=True)
        return None, None


def as_shard(of: Any, value: Any, phase: ForwardPhase | None = None) -> Any:
    """Mark a result computed from parameter `of`, so that mixing it with plain tensors raises, too."""
    if type(value) is DTensor:
        of = _sharded(of)
        value.path, value.meet = of.path, of.meet  # type: ignore[attr-defined]
        value.__class__ = ModelShard
        value.phase = phase  # type: ignore[attr-defined]
    return value


def _explain(error: RuntimeError, func: Any, path: str, arguments: Iterable[Any]) -> None:
    """Raise an error with advice where `error` comes from mixing shards with plain tensors, or from their layout."""
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    are_sharded = [isinstance(tensor, DTensor) for tensor in tensors]
    reasons = ("placement", "Sharding prop", "sharding strategy", "redistribut")
    if func in _FLATTENING or any(reason in str(error) for reason in reasons):
        raise ArgumentError(
            f"{path} is sharded, and its shards cannot be laid out as {func.__name__}() asks: take "
            "parameter.full_tensor(), which all processes must call; the norm of all gradients is what "
            "atorch.clip_grad_norm(model, max_norm) returns"
        ) from error
    if any(are_sharded) and not all(are_sharded):
        raise ArgumentError(
            f"{path} is sharded while its model does not run, and {func.__name__} takes it with plain tensors. Call "
            "the model itself (an argument may tell its forward what to compute), take parameter.full_tensor(), or "
            f"keep it whole: atorch_ignored_cls=({path!r},)"
        ) from error
