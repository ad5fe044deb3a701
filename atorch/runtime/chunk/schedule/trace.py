"""A trace of a training pass: every operation that takes a parameter, and the other bytes that are live meanwhile.

Forward, loss and backward run on fake tensors, or on copies of real ones. The trace's parameters intercept the same
operations as `ChunkedParameter`, and saved tensors become handles as in a real pass. So backward requests parameters in
the order in which autograd really does, with checkpoints, too. A gradient is released when it comes, or with the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from atorch.runtime.chunk.compiled import CompiledModules
from atorch.runtime.chunk.parameter import is_descriptive
from atorch.runtime.chunk.saved_tensors import Handle, saved_as_handles
from atorch.runtime.chunk.schedule.pass_schedule import Access, AccessTrace, HeldViews, Nodes


class LiveCount(Protocol):
    """Counts the bytes of tensors while code runs, except parameters."""

    @property
    def other_bytes(self) -> Sequence[int]:
        """The peak bytes of each moment."""
        ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *fault: Any) -> Any: ...

    def mark(self, name: str) -> None: ...


def trace(
    loss: Callable[[], Tensor],
    parameters: Mapping[str, Tensor],
    live: LiveCount,
    mode: AbstractContextManager[Any],
    compiled: CompiledModules,
    *,
    lingering: bool = False,
) -> AccessTrace:
    """Trace a forward pass, which returns the loss, and its backward pass.

    Args:
        loss: runs forward with the parameters.
        parameters: fakes or copies by name, tied ones once; they become watched parameters.
        live: counts all bytes except the parameters'; it already counts tensors that existed before.
        mode: context for the operations.
        compiled: modules that will be compiled. Here they run eagerly, which saves more for backward than compiled code
            does, but all of their gradients come at their end.
        lingering: each gradient stays until the next one comes, since it is being copied meanwhile.
    """
    watch = _Watch(parameters, live, compiled)
    leaving: Tensor | None = None
    gradients: list[tuple[int, str]] = []

    def let_go(parameter: Tensor, name: str) -> None:
        nonlocal leaving
        gradients.append((len(watch.accesses), name))
        with torch._C.DisableTorchFunctionSubclass():
            watch.hold(name, parameter.grad)
            leaving = parameter.grad if lingering else None
            parameter.grad = None

    with ExitStack() as hooks:  # removed at the end: C++ holds them in cycles that Python's collector cannot see
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                hooks.callback(parameter.register_post_accumulate_grad_hook(partial(let_go, name=name)).remove)
        with torch.enable_grad(), mode, live:
            loss().backward()
            live.mark("end")
    both = zip(watch.accesses, live.other_bytes[1:], strict=True)  # the first moment ends with the first access
    return AccessTrace([Access(operation, names, size) for (operation, names), size in both], gradients)


class _Watch:
    """Notes accesses to parameters, whose memory does not move."""

    def __init__(self, parameters: Mapping[str, Tensor], live: LiveCount, compiled: CompiledModules) -> None:
        self.accesses: list[tuple[str, frozenset[str]]] = []
        self._live, self._nodes, self._compiled = live, Nodes(), compiled
        self._held: list[Tensor | None] = []
        self._whole = {parameter.untyped_storage()._cdata: parameter.detach() for parameter in parameters.values()}
        self._names = {parameter.untyped_storage()._cdata: name for name, parameter in parameters.items()}
        self._views = HeldViews()
        for parameter in parameters.values():
            self._see(parameter)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        names = frozenset(self._named((*args, *kwargs.values())))
        if is_descriptive(func) or not names:
            return func(*args, **kwargs)
        self._note(getattr(func, "__name__", str(func)), names)
        if torch.is_grad_enabled():
            with saved_as_handles(self):
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        self._watch(result)
        return result

    def place_of(self, tensor: Tensor) -> int | None:
        if tensor.layout != torch.strided:
            return None
        storage = tensor.untyped_storage()._cdata
        return storage if storage in self._names else None

    def restored(self, handle: Handle) -> Tensor:
        """The saved tensor, which backward requests."""
        node = torch._C._current_autograd_node()
        name = self._names[handle.place]
        self._note(f"{node.name()} (backward)", frozenset((name,)))
        if name not in self._compiled:
            self._nodes.give(name)
        return handle.within(self._whole[handle.place])

    def hold(self, name: str, gradient: Tensor | None) -> None:
        """Keep a gradient of compiled code alive, which returns all of them at its end."""
        if name in self._compiled:
            self._held.append(gradient)

    def _see(self, tensor: Tensor) -> None:
        real = _WatchedParameter if isinstance(tensor, torch.nn.Parameter) else _WatchedView
        tensor.__class__ = _WatchedFake if isinstance(tensor, FakeTensor) else real
        tensor.watch = self  # type: ignore[attr-defined]

    def _note(self, operation: str, names: frozenset[str]) -> None:
        needs = self._compiled.needs(names)
        if needs is None:
            return
        self._held.clear()
        self._live.mark(operation)
        self.accesses.append((operation, needs.union(self._nodes.given(), self._views.held())))

    def _named(self, values: Iterable[Any]) -> Iterator[str]:
        for value in values:
            if isinstance(value, Tensor):
                place = self.place_of(value)
                if place is not None:
                    yield self._names[place]
            elif isinstance(value, (list, tuple)):
                yield from self._named(value)

    def _watch(self, result: Any) -> None:
        if isinstance(result, (list, tuple)):
            for item in result:
                self._watch(item)
        elif isinstance(result, Tensor) and not isinstance(result, torch.nn.Parameter):
            place = self.place_of(result)
            if place is not None:
                self._see(result)
                if self._names[place] in self._compiled:
                    return  # views inside compiled code are not visible outside
                self._views.add(self._names[place], result)


def _run(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        kwargs = kwargs or {}
        watched = next(_watched_of((*args, *kwargs.values())), None)
        return func(*args, **kwargs) if watched is None else watched.watch.run(func, args, kwargs)


class _WatchedFake(FakeTensor):
    """A fake parameter, or a view of one."""

    watch: _Watch
    __torch_function__: ClassVar[Any] = classmethod(_run)


class _WatchedParameter(torch.nn.Parameter):
    watch: _Watch
    __torch_function__: ClassVar[Any] = classmethod(_run)


class _WatchedView(Tensor):
    watch: _Watch
    __torch_function__: ClassVar[Any] = classmethod(_run)


_Watched = _WatchedFake | _WatchedParameter | _WatchedView


def _watched_of(values: Iterable[Any]) -> Iterator[_Watched]:
    for value in values:
        if isinstance(value, _Watched):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _watched_of(value)
