"""Gradients that refuse to become a number where that would be another one than plain training's.

A process may have parts of split gradients, those of one stage of a pipeline, or what a loss scale multiplies. A norm
or a dot product of these would change training, and nothing would say so. `__torch_function__` sees it on gradients of
the classes below, and on what is computed of them element by element, which is as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from atorch.errors import ArgumentError
from atorch.runtime.fsdp.sharded_access import READING, Outside, as_outside, run, writes
from atorch.runtime.gradients.backward_targets import expects_none, is_own

_ORDINARY = frozenset(("__set__", "as_subclass", "to_local"))
_SELECTING = frozenset(("__getitem__", "index_select", "gather", "masked_select", "take", "take_along_dim"))
"""These give fewer elements, each as it was."""
_PRODUCTS = "dot vdot inner matmul __matmul__ __rmatmul__ mm mv bmm addmm baddbmm einsum tensordot"
_NORMS = "norm vector_norm linalg_norm linalg_vector_norm _foreach_norm normalize renorm layer_norm rms_norm"
_MIXING = frozenset(f"{_PRODUCTS} {_NORMS} sum mean cumsum sort argsort topk softmax log_softmax".split())
"""These take several elements together; what else does so is known by its result, which is smaller."""
_TENSOR: Any = Tensor
_SHAPES = (_TENSOR.shape.__get__, _TENSOR.ndim.__get__, Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride)


class NormGuard(NamedTuple):
    """Facts of a gradient that is not plain training's, or not all of it."""

    name: str  # of the parameter
    why: str
    is_whole: bool = False  # numbers of it alone are right, and those of several gradients are not
    in_hook: bool = False  # a user's hook has it, within backward
    is_piece: bool = False  # of another shape than its parameter

    def refuse(self, func: Any) -> None:
        """Say that `func` is not of what plain training has.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(
            f"the gradient of {self.name} {self.why}, so that {func.__name__} does not give plain training's number; "
            "clip with atorch.clip_grad_norm(model, max_norm), which does, and returns the norm. Under ddp, zero1 and "
            "fsdp numbers that a loop computes of gradients are plain training's"
        )


class _Guarded:
    """The base of the classes below, which are a gradient's own with nothing added."""

    __slots__ = ()
    guard: NormGuard

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, _Guarded)]
            is_known = func.__name__.startswith("_fused")  # what an optimizer computes
            in_backward = torch._C._current_graph_task_id() != -1 and not any(each.guard.in_hook for each in given)
            if not given or is_known or in_backward:
                return func(*args, **kwargs)
            _check(func, given)
            is_sharded = any(isinstance(each, Outside) for each in given)
            try:
                result = run(func, args, kwargs) if is_sharded else func(*args, **kwargs)
            except (RuntimeError, IndexError):  # of a shape that the parameter has
                for each in given:
                    if each.guard.is_piece:
                        each.guard.refuse(func)
                raise
            return _marked(func, given, result, args)


class GuardedGradient(_Guarded, Tensor):
    """A plain tensor otherwise."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.as_subclass(Tensor).__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Travels as an ordinary tensor."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


class GuardedShard(_Guarded, Outside):
    """A shard, as it is while its model does not run, otherwise."""

    __slots__ = ()


_GUARDED: Mapping[type, type] = {Tensor: GuardedGradient, DTensor: GuardedShard, Outside: GuardedShard}


def guarded(gradient: Any, guard: NormGuard) -> Any:
    """The same gradient, which refuses numbers; one of another class is left alone."""
    kind = _GUARDED.get(type(gradient))
    if kind is not None:
        gradient.__class__, gradient.guard = kind, guard
    return gradient


def unguard(tensors: Iterable[Any]) -> list[tuple[Any, NormGuard]]:
    """Let those of the tensors that refuse numbers be ordinary; returns them with what `guarded` takes."""
    taken = [(each, each.__dict__.pop("guard")) for each in tensors if hasattr(each, "guard")]
    for each, _ in taken:
        each.__class__ = Outside if isinstance(each, DTensor) else Tensor
    return taken


def _check(func: Any, given: list[Any]) -> None:
    """Refuse what would read a number, or mix what is not to be mixed."""
    name, first = func.__name__, given[0].guard
    reads = name in READING and (name != "__format__" or not given[0].dim())  # a tensor is shown
    reads |= func in _SHAPES and any(each.guard.is_piece for each in given)
    if first.is_whole:
        mixes = not name.startswith("_foreach") and len({each.guard.name for each in given}) > 1
    else:
        mixes = not _MIXING.isdisjoint((name, name.removesuffix("_")))
    if reads or mixes:
        first.refuse(func)


def _marked(func: Any, given: list[Any], result: Any, args: tuple[Any, ...]) -> Any:
    """The result, which refuses numbers, too."""
    name = func.__name__
    if name in _ORDINARY or name.endswith("_like") or name.startswith("new_"):
        return result
    if name.startswith("_foreach"):
        lists = [each for each in args if isinstance(each, (list, tuple))]
        for each, *of in zip(args[0] if result is None else result, *lists, strict=False):
            _mark(func, [one for one in of if isinstance(one, _Guarded)], each)
    elif not writes(name, {}):
        for each in tree_leaves(result):
            _mark(func, given, each)
    elif args and not isinstance(args[0], _Guarded):
        for each in (args[0], getattr(args[0], "_base", None)):  # which was written through a view of it
            guarded(each, given[0].guard)
    return result


def _mark(func: Any, given: list[Any], result: Any) -> None:
    if not given or not isinstance(result, Tensor):
        return
    guard, most = given[0].guard, max(given, key=Tensor.numel)
    is_less = result.numel() < most.numel() or (result.dim() < most.dim() and result.numel() == 1)
    if is_less and not (guard.is_whole or result._is_view() or func.__name__ in _SELECTING):
        guard.refuse(func)
    guarded(result, guard)


class _Hook:
    """A user's hook on a gradient, in which the gradient is guarded although backward runs."""

    expects_none = True

    def __init__(self, hook: Callable[[Tensor], Any]) -> None:
        self._hook = hook

    def __call__(self, gradient: Any) -> Any:
        own = getattr(gradient, "guard", None)
        if own is None:
            return None if gradient is None else self._hook(gradient)
        gradient.guard = own._replace(in_hook=True)
        try:
            made = self._hook(gradient)
        finally:
            gradient.guard = own
        if hasattr(made, "guard"):
            made.guard = own
        return made


class _Guards:
    """Guards gradients at the end of each backward pass."""

    def __init__(self, of: Mapping[nn.Parameter, NormGuard]) -> None:
        self._of, self._pass, self._taken = of, -1, list[tuple[Any, NormGuard]]()
        for parameter in filter(lambda each: each.requires_grad, of):
            if hasattr(parameter, "placements"):  # FSDP2 calls no others
                parameter.register_post_accumulate_grad_hook(expects_none(partial(self._arrives, None)))
            else:
                parameter.register_hook(expects_none(partial(self._arrives, of[parameter])))

    def _arrives(self, guard: NormGuard | None, gradient: Tensor | None) -> None:
        """Guard what `torch.autograd.grad` takes; what goes to `.grad` comes there as another tensor."""
        if guard is not None:
            guarded(gradient, guard)
        if self._pass != torch._C._current_graph_task_id():
            self._pass = torch._C._current_graph_task_id()
            queue: Any = torch.autograd.Variable._execution_engine
            # Behind what else waits for the end of backward: a reduction may put another gradient in its place.
            queue.queue_callback(lambda: queue.queue_callback(self._end))

    def _end(self) -> None:
        for parameter, guard in self._of.items():
            guarded(as_outside(parameter, parameter.grad), guard)

    def watch_hooks(self, *_: Any) -> None:
        """Guard the gradients of hooks that were registered since the last forward."""
        for parameter in self._of:
            hooks = parameter._backward_hooks or {}
            for key in [key for key, hook in hooks.items() if not is_own(hook)]:
                hooks[key] = _Hook(hooks[key])

    def before_step(self, *_: Any) -> None:
        self._taken = unguard([each.grad for each in self._of])

    def after_step(self, *_: Any) -> None:
        while self._taken:
            guarded(*self._taken.pop())


def guard_gradients(
    why: str, parameters: Mapping[str, nn.Parameter], model: nn.Module, optim: Any, is_whole: bool = False
) -> None:
    """Let gradients that backward passes of `model` will make refuse numbers, except in steps of `optim`."""
    for each in parameters.values():
        if hasattr(each, "guard_gradient"):  # that keeps its gradient elsewhere
            each.guard_gradient(why)
    kept = {name: each for name, each in parameters.items() if not hasattr(each, "guard_gradient")}
    guards = _Guards({each: NormGuard(name, why, is_whole) for name, each in kept.items()})
    if not is_whole:  # else hooks are called behind the pass
        model.register_forward_hook(guards.watch_hooks)
    if hasattr(optim, "_optimizer_step_pre_hooks"):
        optim.register_step_pre_hook(guards.before_step)
        optim.register_step_post_hook(guards.after_step)
