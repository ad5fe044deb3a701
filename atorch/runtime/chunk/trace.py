"""A trace of a training pass: every operation that takes a parameter, and the other bytes that are live meanwhile.

Forward, loss and backward run on fake tensors, or on copies of real ones. The trace's parameters intercept the same
operations as `ChunkedParameter`, and saved tensors become handles as in a real pass. So backward requests parameters in
the order in which autograd really does, with checkpoints, too. A gradient is released when it comes, or with the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from atorch.runtime.chunk.parameter import (
    ChunkedParameter,
    ChunkedView,
    CompiledModules,
    Home,
    Managed,
    Owner,
    saved_as_handles,
)
from atorch.runtime.chunk.pass_schedule import Access, AccessTrace


class LiveCount(Protocol):
    """Counts the bytes of tensors while code runs, except parameters."""

    instants: list[list[int]]
    """The bytes at each change, grouped by moment."""

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
            watch.keep(name, parameter.grad)
            leaving = parameter.grad if lingering else None
            parameter.grad = None

    with ExitStack() as hooks:  # removed at the end: C++ holds them in cycles that Python's collector cannot see
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                hooks.callback(parameter.register_post_accumulate_grad_hook(partial(let_go, name=name)).remove)
        with torch.enable_grad(), mode, live:
            loss().backward()
            live.mark("end")
    both = zip(watch.accesses, live.instants[1:-1], strict=True)  # the first moment ends with the first access
    return AccessTrace([Access(operation, names, max(sizes)) for (operation, names), sizes in both], gradients)


class _Watch(Owner):
    """Notes accesses to parameters, whose memory does not move."""

    def __init__(self, parameters: Mapping[str, Tensor], live: LiveCount, compiled: CompiledModules) -> None:
        super().__init__(compiled)
        self.accesses: list[tuple[str, frozenset[str]]] = []
        self._live = live
        self._kept: list[Tensor | None] = []
        self._memory = {name: parameter.detach() for name, parameter in parameters.items()}
        self._names = {parameter.untyped_storage()._cdata: name for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            self.show(name, parameter)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], managed: Sequence[Managed]) -> Any:
        self.need(getattr(func, "__name__", str(func)), frozenset([tensor.home.name for tensor in managed]))
        with saved_as_handles(self) if torch.is_grad_enabled() else nullcontext():
            result = func(*args, **kwargs)
        self.watch(result)
        return result

    def name_of(self, tensor: Tensor) -> str | None:
        return self._names.get(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else None

    def provide(self, operation: str, names: frozenset[str]) -> None:
        self._kept.clear()
        self._live.mark(operation)
        self.accesses.append((operation, names))

    def memory_of(self, name: str) -> Tensor:
        return self._memory[name]

    def keep(self, name: str, gradient: Tensor | None) -> None:
        """Keep a gradient of compiled code alive, which returns all of them at its end."""
        if name in self.compiled:
            self._kept.append(gradient)

    def show(self, name: str, view: Any) -> None:
        real = ChunkedParameter if isinstance(view, torch.nn.Parameter) else ChunkedView
        view.__class__ = _ManagedFake if isinstance(view, FakeTensor) else real
        view.home = Home(self, name, 0)  # type: ignore[arg-type]  # only to run operations


class _ManagedFake(Managed, FakeTensor):
    """A fake parameter, or a view of one."""
