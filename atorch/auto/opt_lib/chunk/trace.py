"""A trace of a training pass: every operation that takes a parameter, and the other bytes that are live meanwhile.

It runs before the first step, on fake tensors on the training device if it is here, since autocast casts only tensors
of its device. If control flow depends on values, it runs for real, on copies in host memory. The trace's parameters
intercept the same operations as `ChunkedParameter`, and saved tensors become handles as in a real pass. So backward
requests parameters in the order in which autograd really does, with checkpoints, too. A gradient is released when it
comes, or with the next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from atorch.distributed.rng import preserved_rng
from atorch.errors import ArgumentError, AtorchError
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
    Managed,
    MemoryOwner,
    ParameterLocation,
    saved_as_handles,
)
from atorch.runtime.chunk.pass_schedule import Access, AccessTrace


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
) -> AccessTrace:
    """Trace forward, loss and backward of `model` on `batch`, by operation. The model is not changed.

    Args:
        batch: the argument of `loss(model, batch)`; its tensors may be on any device.
        dtype: the type of floating-point parameters in operations; None for their own.
        compiled: names of modules that will be compiled. Here they run eagerly, which saves more for backward than
            compiled code does, but all of their gradients come at their end.
        on_host: tensors in host memory; results that are computed only from them are there, too.
        lingering: each gradient stays until the next one comes, since it is copied to the host meanwhile; None: True on
            CUDA.
        for_real: run on copies of the values of model and batch in place of fakes, if control flow depends on values.
            All processes that share chunks call this together.

    Raises:
        ArgumentError: the model cannot run this way, or reaches its own parameters through globals.
    """
    lingering = device_type == "cuda" if lingering is None else lingering
    is_there = device_type == "cuda" and torch.cuda.is_available() and not for_real
    mode = _for_real(model, dtype) if for_real else _on_fakes(dtype, device_type if is_there else "cpu")
    duplicate, (loss,) = copy_with(model, (loss,), mode.convert)
    batch = map_tensors(mode.convert_input, batch)
    with preserved_rng(), nullcontext() if is_there else as_on(device_type):
        try:
            for name, parameter in duplicate.named_parameters():
                parameter.data = mode.value(name, parameter)
            watch = _Watch(dict(duplicate.named_parameters()), CompiledModules.of(duplicate, compiled), lingering)
            labels = {BUFFERS: [*duplicate.buffers(), *tensors_in(batch)], HOST: on_host}
            with mode.running(), Originals(model):
                return watch.trace(lambda: loss(duplicate, batch), labels)
        except OriginalReachedError:
            raise
        except Exception as error:  # user code may fail in any way, on fakes above all
            if for_real and isinstance(error, AtorchError):
                raise  # its message already names a remedy
            fault = mode.fault.format(type(model).__name__, type(error).__name__, error)
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


class _Watch(MemoryOwner):
    """Notes accesses to parameters, whose memory does not move, and the peak of other bytes until the next one.

    parameters: fakes or copies by name, tied ones once; they become watched parameters.
    """

    def __init__(self, parameters: Mapping[str, Tensor], compiled: CompiledModules, lingering: bool) -> None:
        super().__init__(compiled)
        self._parameters, self._lingering, self._live = parameters, lingering, LiveBytes()
        self._accesses: list[tuple[str, frozenset[str]]] = []
        self._gradients: list[tuple[int, str]] = []
        self._leaving: Tensor | None = None
        self._kept: list[Tensor | None] = []  # gradients of compiled code, which returns all of them at its end
        self._memory = {name: parameter.detach() for name, parameter in parameters.items()}
        self._names = {parameter.untyped_storage()._cdata: name for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            self.show(name, parameter)

    def trace(self, loss: Callable[[], Tensor], labels: Mapping[str, Sequence[Tensor]]) -> AccessTrace:
        """Trace a forward pass, which returns the loss, and its backward pass.

        labels: tensors from before the pass, by category of `LiveBytes`.
        """
        with ExitStack() as hooks:  # removed at the end: C++ holds them in cycles that Python's collector cannot see
            for name, parameter in self._parameters.items():
                if parameter.requires_grad:
                    release = partial(self._release, name)
                    hooks.callback(parameter.register_post_accumulate_grad_hook(release).remove)
            with torch.enable_grad(), self._live:
                for label, tensors in {PARAMETERS: [*self._parameters.values()], **labels}.items():
                    self._live.label(tensors, label)
                loss().backward()
                self._live.mark("end")
        # The first moment ends with the first access.
        peaks = [int(peak.total_bytes - peak.memory.get(PARAMETERS, 0.0)) for peak in self._live.moments[1:]]
        accesses = [Access(*access, peak) for access, peak in zip(self._accesses, peaks, strict=True)]
        return AccessTrace(accesses, self._gradients)

    def _release(self, name: str, parameter: Tensor) -> None:
        self._gradients.append((len(self._accesses), name))
        with torch._C.DisableTorchFunctionSubclass():
            if name in self.compiled:
                self._kept.append(parameter.grad)
            self._leaving = parameter.grad if self._lingering else None
            parameter.grad = None

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
        self._accesses.append((operation, names))

    def memory_of(self, name: str) -> Tensor:
        return self._memory[name]

    def show(self, name: str, view: Any) -> None:
        real = ChunkedParameter if isinstance(view, torch.nn.Parameter) else ChunkedView
        view.__class__ = _ManagedFake if isinstance(view, FakeTensor) else real
        view.home = ParameterLocation(self, name, 0)  # type: ignore[arg-type]  # only to run operations


class _ManagedFake(Managed, FakeTensor):
    """A fake parameter, or a view of one."""
