"""Copies modules along every reference, while `copy.deepcopy` treats functions and weak references as atomic.

A lambda, a closure, a hook, a `forward` on the instance or a default argument may refer to its own module. In a
deepcopy it still refers to the original. Here a function that reaches a copied object is copied as well, with cells and
defaults of its own. So are weak references, bound methods of C, caches and weak dictionaries.

An object that only functions reach is copied if it is a plain container. So is one that leads to a tensor, a module or
an object that the module holds. Others (a logger, a data set, a lock) stay shared, since a function often reaches half
of a program. Copies cannot follow names that are looked up when a function runs: globals and class attributes.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from atorch.errors import ArgumentError
from atorch.model.pytree import local_part
from atorch.model.reachability import Referenced, has_own_deepcopy, is_atomic, is_parametrized, referent

T = TypeVar("T")
Convert = Callable[[torch.Tensor], torch.Tensor]
Memo = dict[int, Any]

UNCOPYABLE = (TypeError, RuntimeError, NotImplementedError, copy.Error)
"""Errors that copying raises for locks, files, generators and the like."""
SMALL = 4096  # elements
_MISSING = object()
_FUNCTION_FIELDS = ("__module__", "__qualname__", "__doc__", "__annotations__")


def duplicate(module: T, memo: Memo | None = None, convert: Convert | None = None) -> T:
    """A deepcopy of `module` without references to the original.

    Args:
        memo: replacements of objects by id, as for `copy.deepcopy`.
        convert: copies every other tensor, given detached; None: a deepcopy.

    Raises:
        TypeError, RuntimeError, NotImplementedError: the module holds an object that cannot be copied, such as a lock.
    """
    return duplicate_with(module, (), memo, convert)[0]


def duplicate_with(
    module: T, others: Iterable[Any], memo: Memo | None = None, convert: Convert | None = None
) -> tuple[T, tuple[Any, ...]]:
    """`duplicate` a module together with functions, such as a loss function that refers to it."""
    beside = tuple(others)
    copier = Copier(module, beside, {} if memo is None else memo, convert)
    copied = copier.whole(module)
    return copied, tuple(copier.whole_if_possible(function) for function in beside)


def lazy_clone(tensor: torch.Tensor) -> torch.Tensor:
    """A clone that shares memory until either is written; a real clone of memory that does not support this.

    That is memory not allocated by torch: a mapped file, shared memory, a numpy array. Small tensors are cloned for
    real, which is as fast, and lets `resize_` enlarge them, as observers do with buffers in the first forward pass.
    """
    try:
        return torch._lazy_clone(tensor) if tensor.numel() > SMALL else tensor.clone()
    except RuntimeError:
        return tensor.clone()


def copy_structure(model: nn.Module, convert: Convert, equal: Sequence[Sequence[nn.Module]] = ()) -> nn.Module:
    """A copy of `model` with `convert(tensor)` in place of every parameter, buffer and other tensor that it reaches.

    Objects shared in the model (tied parameters, a module used twice) are shared in the copy. Gradients are not copied.
    In each group of `equal` modules the copies share the parts of the first one.

    Raises:
        ArgumentError: the model holds an object that cannot be copied, such as a lock or an open file.
    """
    return copy_with(model, (), convert, equal)[0]


def copy_with(
    model: nn.Module,
    functions: Iterable[Any],
    convert: Convert,
    equal: Sequence[Sequence[nn.Module]] = (),
) -> tuple[nn.Module, list[Any]]:
    """`copy_structure`, and copies of `functions`, such as a loss function, that refer to the copy."""
    beside = tuple(functions)
    copier = Copier(model, beside, {}, convert)
    try:
        for first, *rest in equal:
            duplicate = copier.copy(first)
            for block in rest:
                copier.memo[id(block)] = sharing_parts(duplicate)
                # Other references to a part must lead to the same copy.
                for part, other in zip(_parts(first), _parts(block), strict=True):
                    copier.memo[id(other)] = copier.copy(part)
        return copier.whole(model), [copier.whole_if_possible(function) for function in beside]
    except UNCOPYABLE as error:
        raise ArgumentError(
            f"{type(model).__name__} cannot be copied ({error}), and the search tries strategies on copies; keep what "
            "cannot be copied out of the model, or give a load_strategy"
        ) from error


def lazy_copy(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy that shares the model's memory until either is written; meta tensors become real ones on `device`.

    DTensors become this process's local parts.
    """
    return lazy_copy_with(model, (), device)[0]


def lazy_copy_with(model: nn.Module, functions: Iterable[Any], device: torch.device) -> tuple[nn.Module, list[Any]]:
    """`lazy_copy`, and copies of `functions` that refer to the copy."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        tensor = local_part(tensor)
        return typical_values(tensor, device) if tensor.is_meta else lazy_clone(tensor)

    return copy_with(model, functions, convert)


def typical_values(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A real tensor like a meta one, with values of typical size: zeros and denormals would distort timings."""
    real = torch.zeros_like(tensor, device=device)
    return real.uniform_(-0.02, 0.02) if real.is_floating_point() else real


def sharing_parts(module: nn.Module) -> nn.Module:
    """Another module with the same parts, but its own hooks."""
    other: nn.Module = object.__new__(type(module))
    for name, value in vars(module).items():
        vars(other)[name] = copy.copy(value) if "_hooks" in name else value
    return other


def _parts(block: nn.Module) -> list[Any]:
    """Parts of a block, in the same order in equal blocks."""
    modules = [module for module in block.modules() if module is not block]
    return [*modules, *block.parameters(), *block.buffers()]


class Copier:
    """Copies objects that `module` and the functions `others` reach; identical objects stay identical in the copies."""

    def __init__(self, module: Any, others: tuple[Any, ...], memo: Memo, convert: Convert | None) -> None:
        self.memo, self._convert = memo, convert
        self._reachable = Referenced(module, others)
        self._later: list[Callable[[], None]] = []  # fills functions, once their containers are copied

    def whole(self, x: T) -> T:
        """The copy of `x`, with all its functions filled."""
        waiting = len(self._later)
        copied: T = self.copy(x)
        while len(self._later) > waiting:
            self._later.pop()()
        return copied

    def whole_if_possible(self, x: T) -> T:
        """The copy of `x`, or `x` itself, with the attempt undone, if something cannot be copied."""
        num_copied, waiting = len(self.memo), len(self._later)
        try:
            return self.whole(x)
        except UNCOPYABLE:
            for key in list(self.memo)[num_copied:]:
                del self.memo[key]
            del self._later[waiting:]
            return x

    def copy(self, x: Any) -> Any:
        """The copy of `x`; the cells of a copied function may still be empty."""
        copied = self.memo.get(id(x), _MISSING)
        if copied is not _MISSING:
            return copied
        if is_atomic(x) or self._reachable.is_shared(x):
            return x
        made = self._made(x)
        if made is not x:
            self._remember(x, made)
        return made

    def _remember(self, x: Any, made: Any) -> None:
        self.memo[id(x)] = made
        self.memo.setdefault(id(self.memo), []).append(x)  # as deepcopy does: keeps x alive, so its id stays unique

    def _made(self, x: Any) -> Any:
        copies = _COPIES.get(type(x))
        if copies is not None:
            return copies(self, x)
        if isinstance(x, torch.Tensor):
            return self._tensor(x)
        if isinstance(x, weakref.ref):  # a subclass, such as WeakMethod
            return self._weak(x)
        if has_own_deepcopy(x):
            for atom in self._reachable.atoms_below(x):
                self.copy(atom)
            return x.__deepcopy__(self.memo)
        reduced = _reduced(x)
        if isinstance(reduced, str):
            return x
        return copy._reconstruct(x, self.memo, *reduced[:5], deepcopy=self._part)  # type: ignore[attr-defined]

    def _tensor(self, x: torch.Tensor) -> torch.Tensor:
        if self._convert is None:  # deepcopy refuses tensors that are not leaves
            return copy.deepcopy(x, self.memo) if x.is_leaf else x.detach().clone()
        converted = self._convert(x.detach())
        if isinstance(x, nn.Parameter):
            converted = nn.Parameter(converted, requires_grad=x.requires_grad)
            vars(converted).update(vars(x))  # marks that libraries leave on parameters
        elif x.requires_grad and x.is_leaf:
            converted.requires_grad_()
        return converted

    def _part(self, x: Any, memo: Memo) -> Any:
        """`copy`, as the functions of the module `copy` call it."""
        return self.copy(x)

    # Functions.

    def _function(self, x: types.FunctionType) -> types.FunctionType:
        """A function with the code of `x`, filled later since it may refer to itself."""
        if not self._reachable.is_copied(x):
            return x
        cells = tuple(self._cell(cell) for cell in x.__closure__ or ())
        made = types.FunctionType(x.__code__, x.__globals__, x.__name__, None, cells or None)
        for name in _FUNCTION_FIELDS:
            setattr(made, name, getattr(x, name))

        def fill() -> None:
            made.__defaults__ = self._if_possible(x.__defaults__)
            made.__kwdefaults__ = self._if_possible(x.__kwdefaults__)
            for name, value in vars(x).items():
                vars(made)[name] = self.whole_if_possible(value)

        self._later.append(fill)
        return made

    def _if_possible(self, x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(self.whole_if_possible, x))
        return None if x is None else {name: self.whole_if_possible(value) for name, value in x.items()}

    def _cell(self, x: types.CellType) -> types.CellType:
        if id(x) in self.memo:
            return self.memo[id(x)]  # type: ignore[no-any-return]
        made = types.CellType()
        self._remember(x, made)

        def fill() -> None:
            try:
                content = x.cell_contents
            except ValueError:
                return  # an empty cell
            made.cell_contents = self.whole_if_possible(content)

        self._later.append(fill)
        return made

    def _method(self, x: types.MethodType) -> Any:
        return types.MethodType(self.copy(x.__func__), self.copy(x.__self__))

    def _built_in(self, x: Any) -> Any:
        owner = self.copy(x.__self__)
        return x if owner is x.__self__ else getattr(owner, x.__name__)

    def _cached(self, x: Any) -> Any:
        wrapped = self.copy(x.__wrapped__)
        return x if wrapped is x.__wrapped__ else functools.lru_cache(**x.cache_parameters())(wrapped)

    # Containers.

    def _as_deepcopy(self, x: Any) -> Any:
        return copy._deepcopy_dispatch[type(x)](x, self.memo, self._part)  # type: ignore[attr-defined]

    def _dict(self, x: dict[Any, Any]) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        self._remember(x, made)
        for key, value in list(x.items()):
            made[self.copy(key)] = self.copy(value)
        return made

    # Weak references.

    def _weak(self, x: Any) -> Any:
        target = referent(x)
        if not self._reachable.is_copied(target):
            return x
        return type(x)(self.copy(x() if isinstance(x, weakref.WeakMethod) else target), self.copy(x.__callback__))

    def _proxy(self, x: Any) -> Any:
        target = referent(x)
        return weakref.proxy(self.copy(target)) if self._reachable.is_copied(target) else x

    def _weak_dict(self, x: Any) -> Any:
        made = type(x)()
        self._remember(x, made)
        for key, value in list(x.items()):
            made[self.copy(key)] = self.copy(value)
        return made


def _reduced(x: Any) -> Any:
    """The pickle protocol's recipe for `x`."""
    if is_parametrized(x):  # its class refuses pickling, but its parts can be copied
        return object.__new__, (type(x),), vars(x)
    reduce = copyreg.dispatch_table.get(type(x))
    return x.__reduce_ex__(4) if reduce is None else reduce(x)


_COPIES: Mapping[type, Callable[[Copier, Any], Any]] = {
    list: Copier._as_deepcopy,
    dict: Copier._dict,
    tuple: Copier._as_deepcopy,
    types.MethodType: Copier._method,
    types.BuiltinMethodType: Copier._built_in,
    types.MethodWrapperType: Copier._built_in,
    functools._lru_cache_wrapper: Copier._cached,
    weakref.ref: Copier._weak,
    weakref.ProxyType: Copier._proxy,
    weakref.CallableProxyType: Copier._proxy,
    weakref.WeakKeyDictionary: Copier._weak_dict,
    weakref.WeakValueDictionary: Copier._weak_dict,
    types.FunctionType: Copier._function,
    types.CellType: Copier._cell,
}
