"""Objects that a module reaches by any reference, and those that its copy has to copy."""

from __future__ import annotations

import dis
import functools
import gc
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

ATOMIC = frozenset(
    {
        *(type(None), type(...), type(NotImplemented), int, float, bool, complex, bytes, str, range, type, property),
        *(types.CodeType, types.ModuleType, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    }
)
"""Types that are their own copy."""

_CONTAINERS = (list, dict, set, frozenset, tuple, bytearray, deque, OrderedDict, defaultdict)
_MUTABLE = tuple({*_CONTAINERS} - {frozenset, tuple})
_CARRIERS = (
    *(types.FunctionType, types.CellType, types.MethodType, types.BuiltinMethodType, functools.partial),
    functools._lru_cache_wrapper,
)
_PASSING = frozenset({*_CARRIERS, *_CONTAINERS})
_DEPTH, _FEW = 6, 100  # of references from a function to a module, and of items in a container on the way
_ATOMS_OF_DEEPCOPY = (torch.Tensor, types.FunctionType, types.BuiltinMethodType, weakref.ref)


def is_atomic(x: Any) -> bool:
    """True if the object is its own copy."""
    return type(x) in ATOMIC or issubclass(type(x), (type, types.ModuleType))


def has_own_deepcopy(x: Any) -> bool:
    """True if the object's class defines `__deepcopy__`."""
    return hasattr(type(x), "__deepcopy__") and not is_parametrized(x)


def is_parametrized(x: Any) -> bool:
    """True for a class made by torch's parametrizations, whose `__deepcopy__` acts like the default."""
    return getattr(getattr(type(x), "__deepcopy__", None), "__module__", None) == "torch.nn.utils.parametrize"


def modules_reached(functions: Iterable[Any], model: nn.Module) -> list[nn.Module]:
    """Modules, other than the model's, that functions reach: by closures, defaults, attributes and named globals."""
    own, found, seen = set(model.modules()), dict[nn.Module, None](), set[int]()
    waiting = [(function, 0) for function in functions]
    while waiting:
        x, depth = waiting.pop()
        if id(x) in seen or is_atomic(x) or depth > _DEPTH:
            continue
        seen.add(id(x))
        if not isinstance(x, nn.Module):
            waiting += [(reference, depth + 1) for reference in _used_by(x)]
        elif x not in own and own.isdisjoint(x.modules()):
            found[x] = None
        elif x not in own:  # it holds the model, as a module of everything in a script
            waiting += [(child, depth) for child in x.children()]
    return list(found)


def _used_by(x: Any) -> Iterable[Any]:
    if type(x) is types.FunctionType:
        codes, names = [x.__code__], set[str]()
        while codes:
            code = codes.pop()
            names.update(code.co_names)
            codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        named = [x.__globals__[name] for name in names if name in x.__globals__]
        return [*_references(x), *named]
    if isinstance(x, (types.MethodType, types.CellType, functools.partial)):
        return _references(x)
    if isinstance(x, (list, tuple, dict, set)):
        items = x.values() if isinstance(x, dict) else x
        return list(items) if len(x) <= _FEW else ()
    return list(vars(x).values()) if _has_attributes(x) and not type(x).__module__.startswith("torch.") else ()


class Referenced:
    """Objects that `module` and the functions `others` reach."""

    def __init__(self, module: Any, others: tuple[Any, ...]) -> None:
        self._objects: dict[int, Any] = {}
        self._below: dict[int, list[Any]] = {}
        self._above: dict[int, list[int]] = {}
        self._weak: list[Any] = []
        within = self._walk([module], is_held=True)
        self._held = set(self._objects) | {id(x) for x in within if type(x) is not types.FunctionType}
        self._walk([*within, *others], is_held=False)
        self._copied = self._leading()

    def is_copied(self, x: Any) -> bool:
        """True if the object is reached and needs a copy."""
        return id(x) in self._copied

    def is_shared(self, x: Any) -> bool:
        """True if the object is reached and stays shared."""
        return id(x) in self._objects and id(x) not in self._copied

    def atoms_below(self, x: Any) -> Iterator[Any]:
        """Objects that `x` reaches and `copy.deepcopy` copies differently or not at all; none for atorch's classes."""
        if type(x).__module__.partition(".")[0] == __name__.partition(".")[0]:
            return
        waiting, seen = [x], set()
        while waiting:
            reached = waiting.pop()
            if id(reached) in seen:
                continue
            seen.add(id(reached))
            if reached is not x and issubclass(type(reached), _ATOMS_OF_DEEPCOPY):
                yield reached
            waiting += self._below.get(id(reached), ())

    def _walk(self, roots: list[Any], *, is_held: bool) -> list[Any]:
        """Record reached objects. With `is_held`, stop at functions and the like, and return these."""
        waiting, beyond = list(roots), []
        while waiting:
            x = waiting.pop()
            if id(x) in self._objects:
                continue
            if is_held and x is not roots[0] and _ends_holding(x):
                beyond.append(x)
                continue
            self._objects[id(x)] = x
            below = [reference for reference in _references(x) if not is_atomic(reference)]
            self._below[id(x)] = below
            for reference in below:
                self._above.setdefault(id(reference), []).append(id(x))
            if issubclass(type(x), (weakref.ref, *weakref.ProxyTypes)):
                self._weak.append(x)
            waiting += below
        return beyond

    def _leading(self) -> set[int]:
        """Ids of objects to copy: those that lead to a held object, a tensor, a module or a container."""
        strong = [key for key, x in self._objects.items() if key in self._held or _is_target(x)]
        leading = self._leading_to(strong, lambda x: True)
        plain = self._plain()
        loose = [
            key for key, x in self._objects.items() if type(x) in _MUTABLE or (key in plain and _has_attributes(x))
        ]
        loose += self._rebound_cells()
        leading |= self._leading_to(loose, lambda x: type(x) in _PASSING or id(x) in plain)
        for weak in self._weak:
            target = referent(weak)
            if target is not None and id(target) in leading and id(weak) not in leading:
                leading |= self._leading_to([id(weak)], lambda x: True)
        return leading

    def _leading_to(self, targets: Iterable[int], passes: Callable[[Any], bool]) -> set[int]:
        waiting, leading = list(targets), set()
        while waiting:
            key = waiting.pop()
            if key not in leading:
                leading.add(key)
                waiting += [above for above in self._above.get(key, ()) if passes(self._objects[above])]
        return leading

    def _plain(self) -> set[int]:
        """Ids of ordinary instances, functions and containers that lead only to such objects."""
        other = [key for key, x in self._objects.items() if type(x) not in _PASSING and not _is_ordinary(x)]
        return set(self._objects) - self._leading_to(other, lambda x: True)

    def _rebound_cells(self) -> Iterator[int]:
        """Ids of closure cells that functions rebind, such as a counter of calls."""
        for x in self._objects.values():
            if type(x) is types.FunctionType and x.__closure__:
                cells = dict(zip(x.__code__.co_freevars, x.__closure__, strict=True))
                for step in dis.get_instructions(x.__code__):
                    if step.opname == "STORE_DEREF" and step.argval in cells:
                        yield id(cells[step.argval])


def referent(weak: Any) -> Any:
    """The referent of a weak reference or proxy (for a method, the object); None if it is gone."""
    if issubclass(type(weak), weakref.ref):
        return weakref.ref.__call__(weak)
    try:
        return weak.__repr__.__self__  # a proxy forwards everything but this
    except ReferenceError:
        return None


def _references(x: Any) -> Iterable[Any]:
    """Direct references of an object, without a function's globals; none for a tensor."""
    if issubclass(type(x), torch.Tensor):
        return ()
    if type(x) is types.FunctionType:
        return [*(x.__closure__ or ()), *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values(), *vars(x).values()]
    if issubclass(type(x), (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)):
        return [*x.keys(), *x.values()]
    return gc.get_referents(x)


def _ends_holding(x: Any) -> bool:
    """True if objects reached through this one do not belong to the module."""
    return type(x) is types.FunctionType or (has_own_deepcopy(x) and not _is_target(x))


def _is_target(x: Any) -> bool:
    return issubclass(type(x), (torch.Tensor, nn.Module))


def _is_ordinary(x: Any) -> bool:
    """True for an instance of a class without copy or pickle methods of its own."""
    cls: Any = type(x)
    return _has_attributes(x) and cls.__reduce_ex__ is object.__reduce_ex__ and cls.__reduce__ is object.__reduce__


def _has_attributes(x: Any) -> bool:
    """True for an instance with a dict, except functions, containers and classes with `__deepcopy__`."""
    return type(x).__dictoffset__ != 0 and type(x) not in _PASSING and not has_own_deepcopy(x)
