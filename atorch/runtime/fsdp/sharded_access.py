"""Parameters of a sharded model while it does not run: each is the one that the optimizer has.

What FSDP2 keeps gathered for backward it also leaves in the modules, copies that may be of 16 bits. Until backward
begins such a copy stands for its sharded parameter: its gradient is that one's, and what is read or written of it is
read and written there, except beside plain tensors, as in `F.linear(hidden, model.head.weight)`, whose gradients
join those of forward.

A number that was computed of sharded parameters or gradients, such as a norm, is all processes' where a script reads
it, which all have to do, and is made plain where it meets a loss. What else would mix shards with plain tensors is
named.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map

from atorch.errors import ArgumentError
from atorch.model.pytree import tensors_in
from atorch.runtime.data_parallel.collective_order import CollectiveEvent
from atorch.runtime.fsdp.module_state import groups_of, show_sharded
from atorch.runtime.gradients.no_double_backward import refuse_second_order

_TENSOR: Any = Tensor
READING = frozenset(("item", "tolist", "numpy", "is_nonzero", "equal", "allclose")) | {
    f"__{name}__" for name in ("array", "bool", "int", "float", "complex", "index", "format", "contains")
}
"""These give what is no tensor, of the elements that this process has."""
_OF_SOME = frozenset(("max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "median")) | {
    "norm", "vector_norm", "_foreach_norm"
}  # fmt: skip
"""Not all of these are there for no elements, which is the shard that processes have beyond the rows."""
READS = CollectiveEvent("reads what is sharded", is_compared=True)
_FLATTENING = frozenset(getattr(_TENSOR, name) for name in ("flatten", "ravel", "reshape", "view", "view_as"))


class Outside(DTensor):
    """A sharded parameter while its model does not run, its gradient, or what was computed of them."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Join a loss as a plain number; do everything else as ever."""
        return run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._as_ordinary(Tensor.__deepcopy__, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Travels as an ordinary DTensor."""
        return self._as_ordinary(Tensor.__reduce_ex__, protocol)

    def _as_ordinary(self, method: Any, *args: Any) -> Any:
        kind, held = type(self), self.__dict__
        self.__class__ = DTensor  # type: ignore[assignment]
        self.__dict__ = {name: each for name, each in held.items() if name != "meet"}  # which nothing can pickle
        try:
            return method(self, *args)
        finally:
            self.__class__, self.__dict__ = kind, held


class _Stands:
    """The base of a gathered parameter that stands for its sharded one."""

    __slots__ = ()
    sharded: Callable[[], Any]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run `func` on the sharded parameter, unless it computes with plain tensors."""
        return run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.sharded().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.sharded().__reduce_ex__(protocol)


class _Whole(_Stands, nn.Parameter):
    """A gathered parameter."""

    __slots__ = ()


class _Part(_Stands, DTensor):
    """A gathered parameter under tensor parallelism: a part, of which shards were made."""

    __slots__ = ()


def step_as_ordinary(optim: Any) -> Any:
    """`optim`, in whose steps sharded parameters are ordinary DTensors: nothing mixes there, and steps are faster."""
    outside: list[Any] = []

    def before(*_: Any) -> None:
        outside[:] = [each for group in optim.param_groups for each in group["params"] if type(each) is Outside]
        for each in outside:
            each.__class__ = DTensor
            if isinstance(each.grad, Outside):
                each.grad.__class__ = DTensor  # type: ignore[assignment]

    def after(*_: Any) -> None:
        for each in outside:
            if type(each) is DTensor:
                each.__class__ = Outside
        outside.clear()

    if isinstance(optim, torch.optim.Optimizer):
        optim.register_step_pre_hook(before)
        optim.register_step_post_hook(after)
    return optim


_STANDING: Mapping[type[Any], type[Any]] = {nn.Parameter: _Whole, DTensor: _Part}


def stand_for_sharded(root: nn.Module) -> None:
    """Let what is gathered of `root` stand for the sharded parameters except in forward and backward."""
    between = _Between(root)
    root.register_forward_pre_hook(lambda *_: between.end(), prepend=True)
    for module in between.modules:
        module.register_forward_hook(between.watch, prepend=True)  # before FSDP2's, which backward then calls after it
    root.register_forward_hook(lambda *_: between.begin(), always_call=True)


class _Between:
    """Stand-ins for sharded parameters, freed or not: an optimizer may hold one since it was gathered."""

    def __init__(self, root: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        self._root = root
        self.modules: list[Any] = [module for module in root.modules() if isinstance(module, FSDPModule)]
        self._groups = [group for module in self.modules for group in groups_of(module)]
        self._standing: list[Any] = []
        for module in self.modules:
            module.unshard = partial(self._unshard, module.unshard)

    def begin(self) -> None:
        """After forward and backward."""
        self.end()
        for group in self._groups:
            for each in group.fsdp_params:
                self._put(vars(each).get("_unsharded_param"), each.sharded_param)
            if not (group.is_sharded or group.is_unsharded):  # but spread over fewer processes
                show_sharded(group)

    def _put(self, gathered: Any, sharded: Any) -> None:
        if (kind := _STANDING.get(type(gathered))) is not None:  # else a fake, or a kind of tensor of its own
            gathered.sharded = weakref.ref(sharded)
            gathered.__class__ = kind
            self._standing.append(gathered)

    def end(self) -> None:
        """Before forward and backward."""
        for gathered in self._standing:
            sharded = gathered.sharded()
            gathered.__class__ = DTensor if isinstance(gathered, _Part) else nn.Parameter
            if sharded is not None and gathered.requires_grad != sharded.requires_grad:
                gathered.requires_grad_(sharded.requires_grad)
        self._standing.clear()

    def _unshard(self, unshard: Any, async_op: bool = False) -> Any:
        """FSDP2's method, by which a user asks for what is gathered."""
        self.end()
        return unshard(async_op)

    def watch(self, module: nn.Module, args: Any, output: Any) -> None:
        """Keep what forward has frozen or thawed while it was gathered; be told when a backward pass begins."""
        for group in self._groups if module is self._root else groups_of(module):
            if group.is_unsharded:
                for of in group.fsdp_params:
                    if of.unsharded_param.requires_grad != of.sharded_param.requires_grad:
                        of.sharded_param.requires_grad_(of.unsharded_param.requires_grad)

        for tensor in tensors_in(output) if torch.is_grad_enabled() else ():
            if tensor.requires_grad:
                tensor.register_hook(self._begin_backward)

    def _begin_backward(self, _: Tensor) -> None:
        refuse_second_order("fsdp and zero2, which free in backward what forward has gathered")
        if self._standing:
            self.end()
            torch.autograd.Variable._execution_engine.queue_callback(self.begin)


def run(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        if torch._C._current_graph_task_id() != -1:  # FSDP2's own, or forward once more
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return as_outside(args[0], func(*map(_sharded, args)))
        if name == "__set__" and args[1] is None:  # as optimizers clear gradients
            return func(_sharded(args[0]), None)
        given = tree_leaves((args, kwargs))
        first = next((_sharded(each) for each in given if isinstance(each, (Outside, _Stands))), None)
        if first is None:  # in a container that nobody looks into
            return func(*args, **kwargs)
        if name in vars(first):  # a factory: `make_plain_tensors`
            return vars(first)[name](*args[1:], **kwargs)
        plain = [each for each in given if isinstance(each, Tensor) and not isinstance(each, (DTensor, _Stands))]
        changes = writes(name, kwargs)
        into = args[0] if changes else None
        if name in READING or (isinstance(into, Tensor) and not isinstance(into, (DTensor, _Stands))):
            return func(*tree_map(partial(_read_whole, first), args), **tree_map(partial(_read_whole, first), kwargs))
        joins = not changes and any(each.dim() or each.requires_grad for each in plain)
        if joins and func is torch.autograd.grad:
            raise ArgumentError(
                f"torch.autograd.grad was asked for the gradient of {first.path}, which is sharded: its gradient comes "
                "to the shards by loss.backward() alone; call that, and read parameter.grad"
            )
        if isinstance(into, Outside):
            _settle(into)
        args, kwargs = tree_map(_joined if joins else partial(_sharded, into=_sharded(into)), (args, kwargs))
        if name.removeprefix("linalg_") in _OF_SOME:
            args = tree_map(partial(_with_elements, first), args)
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            _explain(error, func, first.path, tree_leaves((args, kwargs)))
            raise
        return result if name.endswith("_like") else tree_map(partial(as_outside, first), result)


def writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    """True if a function changes what it is given: `add_`, `__iadd__`, `__setitem__`, `out=`."""
    is_operator = name.startswith("__") and name.endswith("__")
    return name[2:5] in ("set", "del") or name[2] == "i" if is_operator else name.endswith("_") or "out" in kwargs


def _sharded(value: Any, into: Any = None) -> Any:
    value = value.sharded() if isinstance(value, _Stands) else value
    if isinstance(into, DTensor) and isinstance(value, DTensor) and value.shape == into.shape:
        return value if value.placements == into.placements else value.redistribute(placements=into.placements)
    return value


def _read_whole(of: Any, value: Any) -> Any:
    """All elements, which every process asks for."""
    value = _sharded(value)
    if not isinstance(value, DTensor):
        return value
    if not all(each.is_replicate() for each in value.placements):
        _meet(of)
    return DTensor.full_tensor(value.detach())  # type: ignore[arg-type]


def _meet(of: Any) -> None:
    """Hold the processes to each other before a collective that a script issues by reading."""
    if of.meet is not None:
        of.meet(READS)


def _with_elements(of: Any, value: Any) -> Any:
    """A tensor of which no process has no elements."""
    if isinstance(value, DTensor) and value.dim() and value.shape[0] < value.device_mesh.size():
        _meet(of)
        return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
    return value


def _settle(value: Any) -> None:
    """Make a sum or a norm, of which processes have parts, one that can be written in place."""
    if any(each.is_partial() for each in value.placements):
        _meet(value)
        settled = value.redistribute(placements=[Replicate() if e.is_partial() else e for e in value.placements])
        value._local_tensor, value._spec = settled._local_tensor, settled._spec


def _joined(value: Any) -> Any:
    """The value as it meets plain tensors: a gathered parameter as it is, a number whole."""
    if isinstance(value, _Whole) and not value.untyped_storage().size():  # it was freed
        return value.sharded()
    if not isinstance(value, Outside) or value.dim():
        return value
    whole = value.full_tensor()
    return _AtOnce.apply(whole.detach().requires_grad_(), [whole]) if whole.requires_grad else whole  # type: ignore[no-untyped-call]


class _AtOnce(torch.autograd.Function):
    """A number whose gradient reaches the shards before FSDP2's streams, which nobody waits for, write theirs."""

    @staticmethod
    def forward(ctx: Any, number: Tensor, whole: list[Tensor]) -> Tensor:
        ctx.whole = whole
        return number.view_as(number)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        torch.autograd.backward(ctx.whole, [gradient], retain_graph=True)
        return None, None


def as_outside(of: Any, value: Any) -> Any:
    """Mark what was computed of a parameter: it meets plain tensors no more than that does."""
    if type(value) is DTensor:
        of = _sharded(of)
        value.path, value.meet = of.path, of.meet  # type: ignore[attr-defined]
        value.__class__ = Outside
    return value


def _explain(error: RuntimeError, func: Any, path: str, given: Iterable[Any]) -> None:
    """Raise `error` in words of the user's where shards met plain tensors, or cannot be laid out."""
    tensors = [each for each in given if isinstance(each, Tensor)]
    whole = [isinstance(each, DTensor) for each in tensors]
    reasons = ("placement", "Sharding prop", "sharding strategy", "redistribut")
    if func in _FLATTENING or any(each in str(error) for each in reasons):
        raise ArgumentError(
            f"{path} is sharded, and its shards cannot be laid out as {func.__name__}() asks: take "
            "parameter.full_tensor(), which all processes must call; the norm of all gradients is what "
            "atorch.clip_grad_norm(model, max_norm) returns"
        ) from error
    if any(whole) and not all(whole):
        raise ArgumentError(
            f"{path} is sharded while its model does not run, and {func.__name__} takes it beside plain tensors. Call "
            "the model itself (an argument may tell its forward what to compute), take parameter.full_tensor(), or "
            f"keep it whole: atorch_ignored_cls=({path!r},)"
        ) from error
