"""A trace of a training pass: every operation that takes a parameter, and the other bytes that are live meanwhile.

It runs before the first step, on fake tensors on the training device if it is here, since autocast casts only tensors
of its device. If control flow depends on values, it runs for real, on copies in host memory. The trace's parameters
intercept the same operations as `ChunkedParameter`, and saved tensors become handles as in a real pass. So backward
requests parameters in the order in which autograd really does, with checkpoints, too. A gradient is released when it
comes, or with the next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from atorch.auto.opt_lib.chunk.repeated_layers import LayerTrace, Stack, stack_of
from atorch.distributed.rng import preserved_rng
from atorch.errors import ArgumentError, AtorchError
from atorch.logs import logger
from atorch.model.copy import copy_with
from atorch.model.copy_isolation import OriginalReachedError, Originals
from atorch.model.pytree import local_part, map_tensors, tensors_in
from atorch.profiler.fakes import Fakes, as_on
from atorch.profiler.memory_tracker import BUFFERS, HOST, PARAMETERS, LiveBytes
from atorch.runtime.chunk.operations import host_values
from atorch.runtime.chunk.parameter import (
    ChunkedParameter,
    ChunkedView,
    CompiledModules,
    Home,
    Managed,
    Owner,
    saved_as_handles,
)
from atorch.runtime.chunk.pass_schedule import FEWEST, Access, AccessTrace, deeper, stretches


def trace_pass(
    model: nn.Module,
    batch: Any,
    loss: Callable[[nn.Module, Any], Any],
    *,
    device_type: str,
    dtype: torch.dtype | None = None,
    compiled: Collection[str] = (),
    on_host: Sequence[Tensor] = (),
    lingering: bool | None = None,
    for_real: bool = False,
    whole: bool = False,
) -> AccessTrace:
    """Trace forward, loss and backward of `model` on `batch`, by operation. The model is not changed.

    Args:
        batch: the argument of `loss(model, batch)`; its tensors may be on any device.
        dtype: the type of floating-point parameters in operations; None for their own.
        compiled: names of modules that will be compiled.
        on_host: tensors in host memory; results that are computed only from them are there, too.
        lingering: each gradient stays until the next one comes, since it is copied to the host meanwhile; None: True on
            CUDA.
        for_real: run on copies of the values of model and batch in place of fakes, if control flow depends on values.
            All processes that share chunks call this together.
        whole: run every block, even if the trace of many equal blocks follows from a few.

    Raises:
        ArgumentError: the model cannot run this way, or reaches its own parameters through globals.
    """
    job = _Job(model, batch, loss, device_type, dtype, compiled, on_host, lingering, for_real)
    stack = None if for_real or whole else stack_of(model, compiled)
    extended = None if stack is None else _extended(job, stack)
    return job.traced()[0] if extended is None else extended


def _extended(job: _Job, stack: Stack) -> AccessTrace | None:
    """The trace of a deep model, extended from three shallow copies; None if its blocks are not treated alike."""
    try:
        whole = job.called(stack)
        passes = []
        for more, depth in enumerate(stack.depths):
            calls = LayerTrace(stack, depth, job.device_type)
            access, instants = job.traced(calls)
            if not calls.is_continued(whole):
                return None
            passes.append(stretches(access, instants, FEWEST + more, stack.period_of))
    except OriginalReachedError:
        raise
    except Exception as error:  # a model may fail in any way with fewer blocks than it was made of
        logger.debug("%s is traced whole, it does not run with fewer blocks: %s", type(job.model).__name__, error)
        return None
    return deeper(passes, stack.later, (len(stack.blocks) - stack.depths[0]) // stack.period)


class _Job(NamedTuple):
    model: nn.Module
    batch: Any
    loss: Callable[[nn.Module, Any], Any]
    device_type: str
    dtype: torch.dtype | None
    compiled: Collection[str]
    on_host: Sequence[Tensor]
    lingering: bool | None
    for_real: bool

    def traced(self, calls: LayerTrace | None = None) -> tuple[AccessTrace, list[list[int]]]:
        """Trace a pass; return it, and the bytes other than parameters at each instant of its operations.

        calls: makes the copy, and records the calls of its blocks.
        """
        with self._copied(calls) as (duplicate, loss, batch, mode):
            parameters = dict(duplicate.named_parameters())
            existing = {name for name, _ in duplicate.named_modules()}
            modules = CompiledModules.of(duplicate, [name for name in self.compiled if name in existing])
            live = _OtherBytes(parameters, [*duplicate.buffers(), *tensors_in(batch)], self.on_host)
            lingering = self.device_type == "cuda" if self.lingering is None else self.lingering

            def computed_loss() -> Any:
                with calls or nullcontext():
                    return loss(duplicate, batch)

            access = trace(computed_loss, parameters, live, mode, modules, lingering=lingering)
            return access, live.instants[1:-1]

    def called(self, stack: Stack) -> LayerTrace:
        """The calls of all blocks of `stack` in a forward pass, in which only the first few blocks compute."""
        calls = LayerTrace(stack, stack.depths[-1], self.device_type, is_whole=True)
        with self._copied(calls) as (duplicate, loss, batch, mode), torch.enable_grad(), mode, calls:
            loss(duplicate, batch)
        return calls

    @contextmanager
    def _copied(
        self, calls: LayerTrace | None
    ) -> Iterator[tuple[nn.Module, Callable[[nn.Module, Any], Any], Any, AbstractContextManager[Any]]]:
        """A copy of the model, its loss, batch and a context to run in, on the training device or as if it were there.

        calls: makes the copy; None for a plain one.
        """
        is_there = self.device_type == "cuda" and torch.cuda.is_available() and not self.for_real
        device = self.device_type if is_there else "cpu"
        mode = _for_real(self.model, self.dtype) if self.for_real else _on_fakes(self.dtype, device)
        copy = copy_with if calls is None else calls.copy_with
        duplicate, (loss,) = copy(self.model, (self.loss,), mode.convert)
        batch = map_tensors(mode.convert_input, self.batch)
        with preserved_rng(), nullcontext() if is_there else as_on(self.device_type):
            try:
                for name, parameter in duplicate.named_parameters():
                    parameter.data = mode.value(name, parameter)
                yield duplicate, loss, batch, _guarded(mode.running(), self.model)
            except OriginalReachedError:
                raise
            except Exception as error:  # user code may fail in any way, on fakes above all
                if self.for_real and isinstance(error, AtorchError):
                    raise  # its message already names a remedy
                fault = mode.fault.format(type(self.model).__name__, type(error).__name__, error)
                raise ArgumentError(fault) from error


class _RunMode(NamedTuple):
    convert: Callable[[Tensor], Tensor]
    """Converts the model's tensors."""
    convert_input: Callable[[Tensor], Tensor]
    value: Callable[[str, Tensor], Tensor]
    """Gives a parameter's value, by its name and its copy."""
    running: Callable[[], AbstractContextManager[None]]
    fault: str


def _on_fakes(dtype: torch.dtype | None, device: str) -> _RunMode:
    fakes = Fakes(device)

    def value(name: str, copied: Tensor) -> Tensor:
        # A parameter in a chunk is one expanded element here, whose strides its gradient must not take over.
        return fakes.fake(torch.empty_like(copied, dtype=_cast(copied, dtype), device="meta"))

    return _RunMode(fakes.fake, fakes.fake_unless_known, value, fakes.running, "{} cannot run on fake tensors ({}: {})")


def _for_real(model: nn.Module, dtype: torch.dtype | None) -> _RunMode:
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ArgumentError(f"{type(model).__name__} is on the meta device and cannot run; give it on a real device")
    values = host_values(model)

    def copied(tensor: Tensor) -> Tensor:
        return local_part(tensor).detach().to("cpu", copy=True)

    def value(name: str, parameter: Tensor) -> Tensor:
        original = values[name]
        return torch.empty_like(original, dtype=_cast(original, dtype), device="cpu").copy_(original)

    return _RunMode(
        copied,
        copied,
        value,
        nullcontext,
        "{} cannot run before the first step ({}: {}), and chunks are scheduled by such a run; let forward and loss "
        "run on the host, too, or use fsdp with cpu_offload",
    )


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


@contextmanager
def _guarded(mode: AbstractContextManager[None], model: nn.Module) -> Iterator[None]:
    with mode, Originals(model):
        yield


class _OtherBytes(LiveBytes):
    """Live bytes on the device other than parameters; tensors from before the pass count."""

    def __init__(self, parameters: Mapping[str, Tensor], before: Sequence[Tensor], on_host: Sequence[Tensor]) -> None:
        super().__init__()
        self._parameters, self._before, self._on_host = parameters, before, on_host
        self.instants: list[list[int]] = [[0]]
        """Bytes other than parameters at each change, grouped by moment."""

    def __enter__(self) -> Any:
        entered = super().__enter__()  # type: ignore[no-untyped-call]
        self.label(self._parameters.values(), PARAMETERS)
        self.label(self._before, BUFFERS)
        self.label(self._on_host, HOST)
        return entered

    def mark(self, name: str, index: int | None = None) -> None:
        super().mark(name, index)
        self.instants.append([self._other_now])

    def _see(self) -> None:
        super()._see()
        if self.instants[-1][-1] != self._other_now:
            self.instants[-1].append(self._other_now)

    @property
    def _other_now(self) -> int:
        return int(self._total - self.now.get(PARAMETERS, 0.0))


def trace(
    loss: Callable[[], Tensor],
    parameters: Mapping[str, Tensor],
    live: _OtherBytes,
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

    def release(parameter: Tensor, name: str) -> None:
        nonlocal leaving
        gradients.append((len(watch.accesses), name))
        with torch._C.DisableTorchFunctionSubclass():
            watch.keep(name, parameter.grad)
            leaving = parameter.grad if lingering else None
            parameter.grad = None

    with ExitStack() as hooks:  # removed at the end: C++ holds them in cycles that Python's collector cannot see
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                hooks.callback(parameter.register_post_accumulate_grad_hook(partial(release, name=name)).remove)
        with torch.enable_grad(), mode, live:
            loss().backward()
            live.mark("end")
    both = zip(watch.accesses, live.instants[1:-1], strict=True)  # the first moment ends with the first access
    return AccessTrace([Access(operation, names, max(sizes)) for (operation, names), sizes in both], gradients)


class _Watch(Owner):
    """Notes accesses to parameters, whose memory does not move."""

    def __init__(self, parameters: Mapping[str, Tensor], live: _OtherBytes, compiled: CompiledModules) -> None:
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
