"""Copies of modules that follow every reference, where `copy.deepcopy` takes functions and weak references for atoms.

A lambda, a closure, a hook, a `forward` on the instance or a default argument may reach the module that it belongs to.
In a deepcopy it goes on reaching the original. Here a function that reaches something that is copied is copied, too,
with cells and defaults of its own, and so are weak references, bound methods of C, caches and weak dictionaries.

What only functions reach is copied where it leads to a tensor, a module or something that the module holds, or where
it is a plain container; anything else there (a logger, a data set, a lock) stays shared, since a function often reaches
half of a program. What no copy can follow are names that are looked up when a function runs: globals, class attributes.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from atorch.model.reachability import Referenced, has_own_deepcopy, is_atomic, is_parametrized, referent

T = TypeVar("T")
Convert = Callable[[torch.Tensor], torch.Tensor]
Memo = dict[int, Any]

UNCOPYABLE = (TypeError, RuntimeError, NotImplementedError, copy.Error)
"""Errors that copying raises on locks, files, generators and their like."""
SMALL = 4096  # elements
_MISSING = object()
_FUNCTION_FIELDS = ("__module__", "__qualname__", "__doc__", "__annotations__")


def duplicate(module: T, memo: Memo | None = None, convert: Convert | None = None) -> T:
    """A deepcopy of `module` that reaches nothing of the original by references.

    Args:
        memo: what takes the place of an object, by its id, as for `copy.deepcopy`.
        convert: makes the copy of every other tensor, of its detached self; None for a deepcopy of it.

    Raises:
        TypeError, RuntimeError, NotImplementedError: the module holds what cannot be copied, such as a lock.
    """
    return duplicate_with(module, (), memo, convert)[0]


def duplicate_with(
    module: T, others: Iterable[Any], memo: Memo | None = None, convert: Convert | None = None
) -> tuple[T, tuple[Any, ...]]:
    """`duplicate`, and the same of functions beside the module: a loss function that reaches it follows the copy."""
    beside = tuple(others)
    copier = Copier(module, beside, {} if memo is None else memo, convert)
    copied = copier.whole(module)
    return copied, tuple(copier.whole_if_possible(each) for each in beside)


def lazy_clone(tensor: torch.Tensor) -> torch.Tensor:
    """A clone that shares memory until either is written; a real one of memory that cannot be shared so.

    That is what torch has not allocated itself: a mapped file, shared memory, an array of numpy's. And what is small is
    as quickly copied, which `resize_` can make larger then, as observers' buffers are in the first forward pass.
    """
    try:
        return torch._lazy_clone(tensor) if tensor.numel() > SMALL else tensor.clone()
    except RuntimeError:
        return tensor.clone()


class Copier:
    """Copies of what `module`, and the functions `others`, reach; what is the same object stays the same in copies.

    In the places of those in `without` is None.
    """

    def __init__(
        self,
        module: Any,
        others: tuple[Any, ...],
        memo: Memo,
        convert: Convert | None,
        without: Collection[Any] = (),
    ) -> None:
        self.memo = memo
        self.memo.update((id(each), None) for each in without)
        self._convert = convert
        self._found = Referenced(module, others, without)
        self._later: list[Callable[[], None]] = []  # functions are filled when what they stand in is there

    def whole(self, x: T) -> T:
        """The copy of `x`, with all functions that it has."""
        waiting = len(self._later)
        copied: T = self.copy(x)
        while len(self._later) > waiting:
            self._later.pop()()
        return copied

    def whole_if_possible(self, x: T) -> T:
        """The copy of `x`, or `x` where something cannot be copied; then nothing of the attempt is left."""
        known, waiting = len(self.memo), len(self._later)
        try:
            return self.whole(x)
        except UNCOPYABLE:
            for key in list(self.memo)[known:]:
                del self.memo[key]
            del self._later[waiting:]
            return x

    def copy(self, x: Any) -> Any:
        """The copy of `x`; of a function one whose cells may still be empty."""
        known = self.memo.get(id(x), _MISSING)
        if known is not _MISSING:
            return known
        if is_atomic(x) or self._found.is_shared(x):
            return x
        made = self._made(x)
        if made is not x:
            self._remember(x, made)
        return made

    def _remember(self, x: Any, made: Any) -> None:
        self.memo[id(x)] = made
        self.memo.setdefault(id(self.memo), []).append(x)  # as deepcopy does: no other object gets this id meanwhile

    def _made(self, x: Any) -> Any:
        copies = _COPIES.get(type(x))
        if copies is not None:
            return copies(self, x)
        if isinstance(x, torch.Tensor):
            return self._tensor(x)
        if isinstance(x, weakref.ref):  # a class of its own, such as WeakMethod
            return self._weak(x)
        if has_own_deepcopy(x):
            for each in self._found.atoms_below(x):
                self.copy(each)
            return x.__deepcopy__(self.memo)
        reduced = _reduced(x)
        return x if isinstance(reduced, str) else self._rebuilt(x, *reduced)

    def _tensor(self, x: torch.Tensor) -> torch.Tensor:
        if self._convert is None:  # of a result of computing, deepcopy makes no copy
            return copy.deepcopy(x, self.memo) if x.is_leaf else x.detach().clone()
        converted = self._convert(x.detach())
        if isinstance(x, nn.Parameter):
            converted = nn.Parameter(converted, requires_grad=x.requires_grad)
            vars(converted).update(vars(x))  # marks that libraries leave on parameters
        elif x.requires_grad and x.is_leaf:
            converted.requires_grad_()
        return converted

    def _rebuilt(
        self, x: Any, make: Any, args: Any, state: Any = None, items: Any = None, pairs: Any = None, *_: Any
    ) -> Any:
        """The object that the pickle protocol makes of copies of the parts."""
        made = make(*(self.copy(each) for each in args))
        self._remember(x, made)
        if state is not None:
            self._set_state(made, self.copy(state))
        for item in () if items is None else items:
            made.append(self.copy(item))
        for key, value in () if pairs is None else pairs:
            made[self.copy(key)] = self.copy(value)
        return made

    @staticmethod
    def _set_state(made: Any, state: Any) -> None:
        if hasattr(made, "__setstate__"):
            made.__setstate__(state)
            return
        attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
        vars(made).update(attributes or {})
        for name, value in (slots or {}).items():
            setattr(made, name, value)

    # Functions.

    def _function(self, x: types.FunctionType) -> types.FunctionType:
        """A function of the same code as `x`, which is filled later: it may reach itself."""
        if not self._found.is_copied(x):
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
        """A tuple or dict of defaults with those copied that can be."""
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
                return  # it is empty
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

    def _list(self, x: list[Any]) -> list[Any]:
        made: list[Any] = []
        self._remember(x, made)
        made.extend(map(self.copy, x))
        return made

    def _dict(self, x: dict[Any, Any]) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        self._remember(x, made)
        for key, value in list(x.items()):
            made[self.copy(key)] = self.copy(value)
        return made

    def _tuple(self, x: tuple[Any, ...]) -> tuple[Any, ...]:
        made = tuple(map(self.copy, x))
        if id(x) in self.memo:  # it is in a cycle with one of its members
            return self.memo[id(x)]  # type: ignore[no-any-return]
        return x if all(one is other for one, other in zip(made, x, strict=True)) else made

    # Weak references.

    def _weak(self, x: Any) -> Any:
        target = referent(x)
        if not self._found.is_copied(target):
            return x
        return type(x)(self.copy(x() if isinstance(x, weakref.WeakMethod) else target), self.copy(x.__callback__))

    def _proxy(self, x: Any) -> Any:
        target = referent(x)
        return weakref.proxy(self.copy(target)) if self._found.is_copied(target) else x

    def _weak_dict(self, x: Any) -> Any:
        made = type(x)()
        self._remember(x, made)
        for key, value in list(x.items()):
            made[self.copy(key)] = self.copy(value)
        return made


def _reduced(x: Any) -> Any:
    """The pickle protocol's recipe for `x`."""
    if is_parametrized(x):  # its class refuses to be pickled, as a file would be; it is no file
        return object.__new__, (type(x),), vars(x)
    reduce = copyreg.dispatch_table.get(type(x))
    return x.__reduce_ex__(4) if reduce is None else reduce(x)


_COPIES: Mapping[type, Callable[[Copier, Any], Any]] = {
    list: Copier._list,
    dict: Copier._dict,
    tuple: Copier._tuple,
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
