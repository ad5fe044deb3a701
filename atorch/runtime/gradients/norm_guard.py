"""Gradients that refuse reductions to a number that would differ from plain training's.

A process may have parts of sharded gradients, gradients of one pipeline stage, or gradients times a loss scale. A norm
or a dot product of these would silently change training. Gradients of the classes below refuse it, by
`__torch_function__`, and so do results of element-wise operations on them, which work as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from atorch.errors import ArgumentError
from atorch.runtime.fsdp.sharded_access import READING, ModelShard, as_shard, run, writes
from atorch.runtime.gradients.backward import expects_none, is_own

_ORDINARY = frozenset(("__set__", "as_subclass", "to_local"))
_SELECTING = frozenset(("__getitem__", "index_select", "gather", "masked_select", "take", "take_along_dim"))
"""Operations that select elements without changing them."""
_PRODUCTS = "dot vdot inner matmul __matmul__ __rmatmul__ mm mv bmm addmm baddbmm einsum tensordot"
_NORMS = "norm vector_norm linalg_norm linalg_vector_norm _foreach_norm normalize renorm layer_norm rms_norm"
_MIXING = frozenset(f"{_PRODUCTS} {_NORMS} sum mean cumsum sort argsort topk softmax log_softmax".split())
"""Operations that combine several elements; others are recognized by their smaller result."""
SCALED = "is multiplied by the loss scale until optim.step()"
"""A reason for a guard, with which a gradient is not added to parameters either."""
_TENSOR: Any = Tensor
_SHAPES = (_TENSOR.shape.__get__, _TENSOR.ndim.__get__, Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride)


class NormGuard(NamedTuple):
    """Facts of a gradient that differs from plain training's, or is only part of it."""

    name: str  # of the parameter
    why: str
    is_whole: bool = False  # its own numbers are right, but not those of several gradients together
    in_hook: bool = False  # a user's hook has it, within backward
    is_piece: bool = False  # its shape is not the parameter's

    def refuse(self, func: Any) -> None:
        """Raise an ArgumentError, since the result of `func` would differ from plain training's."""
        raise ArgumentError(
            f"the gradient of {self.name} {self.why}, so that {func.__name__} does not give plain training's number; "
            "clip with atorch.clip_grad_norm(model, max_norm), which does, and returns the norm. Under ddp, zero1 and "
            "fsdp numbers that a loop computes of gradients are plain training's"
        )


class _Guarded:
    """The base of the classes below, which behave like a gradient's own class otherwise."""

    __slots__ = ()
    guard: NormGuard

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            gradients = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Guarded)]
            is_known = func.__name__.startswith("_fused")  # a kernel of an optimizer
            in_backward = torch._C._current_graph_task_id() != -1 and not any(g.guard.in_hook for g in gradients)
            if not gradients or is_known or in_backward:
                return func(*args, **kwargs)
            _check(func, gradients, args)
            is_sharded = any(isinstance(gradient, ModelShard) for gradient in gradients)
            try:
                result = run(func, args, kwargs) if is_sharded else func(*args, **kwargs)
            except (RuntimeError, IndexError):  # the caller may have expected the parameter's shape
                for gradient in gradients:
                    if gradient.guard.is_piece:
                        gradient.guard.refuse(func)
                raise
            return _marked(func, gradients, result, args)


class GuardedGradient(_Guarded, Tensor):
    """A guarded plain tensor."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.as_subclass(Tensor).__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


class GuardedShard(_Guarded, ModelShard):
    """A guarded shard, as it is outside the model's passes."""

    __slots__ = ()


_GUARDED: Mapping[type, type] = {Tensor: GuardedGradient, DTensor: GuardedShard, ModelShard: GuardedShard}


def guarded(gradient: Any, guard: NormGuard) -> Any:
    """Guard a gradient, in place; one of another class is left alone."""
    kind = _GUARDED.get(type(gradient))
    if kind is not None:
        gradient.__class__, gradient.guard = kind, guard
    return gradient


def unguard(tensors: Iterable[Any]) -> list[tuple[Any, NormGuard]]:
    """Make guarded tensors ordinary, in place; returns them with their guards, as `guarded` takes them."""
    unguarded = [(tensor, tensor.__dict__.pop("guard")) for tensor in tensors if hasattr(tensor, "guard")]
    for tensor, _ in unguarded:
        tensor.__class__ = ModelShard if isinstance(tensor, DTensor) else Tensor
    return unguarded


def _check(func: Any, gradients: list[Any], args: tuple[Any, ...]) -> None:
    """Refuse functions that would read a number, combine elements or gradients, or add scaled ones to parameters."""
    name, first = func.__name__, gradients[0].guard
    into = tree_leaves(args[:1]) if first.why == SCALED and name not in _ORDINARY and writes(name, {}) else ()
    if any(isinstance(leaf, nn.Parameter) for leaf in into):
        raise ArgumentError(
            f"the gradient of {first.name} {SCALED}, and {name} would write it into a parameter; train in bf16, "
            "which needs no loss scale"
        )
    reads = name in READING and (name != "__format__" or not gradients[0].dim())  # formatting a tensor only shows it
    reads |= func in _SHAPES and any(gradient.guard.is_piece for gradient in gradients)
    if first.is_whole:
        mixes = not name.startswith("_foreach") and len({gradient.guard.name for gradient in gradients}) > 1
    else:
        mixes = not _MIXING.isdisjoint((name, name.removesuffix("_")))
    if reads or mixes:
        first.refuse(func)


def _marked(func: Any, gradients: list[Any], result: Any, args: tuple[Any, ...]) -> Any:
    """The result, guarded like the gradients that it depends on."""
    name = func.__name__
    if name in _ORDINARY or name.endswith("_like") or name.startswith("new_"):
        return result
    if name.startswith("_foreach"):
        lists = [arg for arg in args if isinstance(arg, (list, tuple))]
        for output, *operands in zip(args[0] if result is None else result, *lists, strict=False):
            _mark(func, [operand for operand in operands if isinstance(operand, _Guarded)], output)
    elif not writes(name, {}):
        for leaf in tree_leaves(result):
            _mark(func, gradients, leaf)
    elif args and not isinstance(args[0], _Guarded):
        for written in (args[0], getattr(args[0], "_base", None)):  # the base was written through its view
            guarded(written, gradients[0].guard)
    return result


def _mark(func: Any, gradients: list[Any], result: Any) -> None:
    if not gradients or not isinstance(result, Tensor):
        return
    guard, largest = gradients[0].guard, max(gradients, key=Tensor.numel)
    is_less = result.numel() < largest.numel() or (result.dim() < largest.dim() and result.numel() == 1)
    if is_less and not (guard.is_whole or result._is_view() or func.__name__ in _SELECTING):
        guard.refuse(func)
    guarded(result, guard)


class _Hook:
    """A user's hook on a gradient, in which the gradient is guarded even within backward."""

    expects_none = True

    def __init__(self, hook: Callable[[Tensor], Any]) -> None:
        self._hook = hook

    def __call__(self, gradient: Any) -> Any:
        guard = getattr(gradient, "guard", None)
        if guard is None:
            return None if gradient is None else self._hook(gradient)
        gradient.guard = guard._replace(in_hook=True)
        try:
            changed = self._hook(gradient)
        finally:
            gradient.guard = guard
        if hasattr(changed, "guard"):
            changed.guard = guard
        return changed


class _Guards:
    """Guards gradients at the end of each backward pass."""

    def __init__(self, of: Mapping[nn.Parameter, NormGuard]) -> None:
        # Weak: the parameters' hooks refer to this object, and Python does not collect cycles through hooks.
        self._of, self._pass, self._taken = WeakIdKeyDictionary(of), -1, list[tuple[Any, NormGuard]]()
        for parameter in filter(lambda p: p.requires_grad, of):
            if hasattr(parameter, "placements"):  # FSDP2 calls only post-accumulate hooks
                parameter.register_post_accumulate_grad_hook(expects_none(partial(self._arrives, None)))
            else:
                parameter.register_hook(expects_none(partial(self._arrives, of[parameter])))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_of": dict(self._of)}  # copies of the model guard their own parameters

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _of=WeakIdKeyDictionary(state["_of"]))

    def _arrives(self, guard: NormGuard | None, gradient: Tensor | None) -> None:
        """Guard a gradient for `torch.autograd.grad`, and at the end of the pass those in `.grad`."""
        if guard is not None:
            guarded(gradient, guard)
        if self._pass != torch._C._current_graph_task_id():
            self._pass = torch._C._current_graph_task_id()
            queue: Any = torch.autograd.Variable._execution_engine
            # After other callbacks at the end of backward, since a reduction may replace the gradient.
            queue.queue_callback(lambda: queue.queue_callback(self._end))

    def _end(self) -> None:
        for parameter, guard in self._of.items():
            guarded(as_shard(parameter, parameter.grad), guard)

    def watch_hooks(self, *_: Any) -> None:
        """Guard gradients in hooks that were registered since the last forward."""
        for parameter in self._of:
            hooks = parameter._backward_hooks or {}
            for key in [key for key, hook in hooks.items() if not is_own(hook)]:
                hooks[key] = _Hook(hooks[key])

    def before_step(self, *_: Any) -> None:
        self._taken = unguard([parameter.grad for parameter in self._of])

    def after_step(self, *_: Any) -> None:
        while self._taken:
            guarded(*self._taken.pop())


def guard_gradients(
    why: str, parameters: Mapping[str, nn.Parameter], model: nn.Module, optim: Any, is_whole: bool = False
) -> None:
    """Guard the gradients of all later backward passes of `model`, except in steps of `optim`."""
    for parameter in parameters.values():
        if hasattr(parameter, "guard_gradient"):  # a chunked parameter guards its own gradient
            parameter.guard_gradient(why)
    unguarded = {name: parameter for name, parameter in parameters.items() if not hasattr(parameter, "guard_gradient")}
    guards = _Guards({parameter: NormGuard(name, why, is_whole) for name, parameter in unguarded.items()})
    if not is_whole:  # else hooks are called after the pass
        model.register_forward_hook(guards.watch_hooks)
    if hasattr(optim, "_optimizer_step_pre_hooks"):
        optim.register_step_pre_hook(guards.before_step)
        optim.register_step_post_hook(guards.after_step)
