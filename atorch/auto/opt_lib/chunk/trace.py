"""A pass of training before the first one, for methods that must know beforehand what is needed when, and what lives.

It runs on fake tensors, of the device where that is here: autocast casts what is on its own device alone. Where values
decide which way a model goes, it runs for real, on copies in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atorch.auto.opt_lib.chunk.repeated_layers import LayerTrace, Stack, stack_of
from atorch.distributed.rng import preserved_rng
from atorch.errors import ArgumentError, AtorchError
from atorch.logs import logger
from atorch.model.alias_guard import OriginalReachedError, Originals
from atorch.model.structure_copy import copy_with
from atorch.model.tensors import local_part, map_tensors, tensors_of
from atorch.profiler.capture.devices import as_on
from atorch.profiler.capture.fakes import Fakes
from atorch.profiler.memory_tracker import BUFFERS, HOST, PARAMETERS, LiveBytes
from atorch.runtime.chunk.compiled import CompiledModules
from atorch.runtime.chunk.operations import host_values
from atorch.runtime.chunk.schedule.depth_extrapolation import deeper, events_of
from atorch.runtime.chunk.schedule.pass_schedule import AccessTrace
from atorch.runtime.chunk.schedule.trace import trace


def foreseen(
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
    """The pass of forward, loss and backward of `model` on `batch`, by operation. The model is not touched.

    Args:
        batch: what `loss(model, batch)` takes; its tensors may be anywhere.
        dtype: of floating-point parameters as operations will see them; None for their own.
        compiled: names of modules whose code will be compiled.
        on_host: tensors in host memory, of which more is asked of some; what is computed of them alone is there, too.
        lingering: gradients travel to the host beside computation, each until the next one comes; None for what
            transfers do on such a device.
        for_real: run on copies of the model's values and the batch's in place of fakes, for a model whose control flow
            depends on values. Where processes share its chunks, all of them call this at once.
        whole: every block is run, also where the pass of many alike ones follows from those of a few.

    Raises:
        ArgumentError: the model cannot run so, or reaches its own parameters by globals.
    """
    job = _Job(model, batch, loss, device_type, dtype, compiled, on_host, lingering, for_real)
    stack = None if for_real or whole else stack_of(model, compiled)
    found = None if stack is None else _extended(job, stack)
    return job.traced()[0] if found is None else found


def _extended(job: _Job, stack: Stack) -> AccessTrace | None:
    """The pass of a model of many blocks that are alike, from those of three with fewer; None where it is another."""
    try:
        whole = job.called(stack)
        passes = []
        for depth in stack.depths:
            calls = LayerTrace(job.device_type)
            found, instants = job.traced(stack, depth, calls)
            if not calls.is_continued(whole, stack, depth):
                return None
            passes.append(events_of(found, instants))
    except OriginalReachedError:
        raise
    except Exception as error:  # a model may fail in any way with other blocks than it was made of
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

    def traced(
        self, stack: Stack | None = None, depth: int = 0, calls: LayerTrace | None = None
    ) -> tuple[AccessTrace, list[list[int]]]:
        """A pass, and the bytes beside parameters at each instant of its operations.

        Args:
            stack, depth: where the model is to have fewer blocks than it has, of which list how many.
            calls: notes how those are called.
        """
        without = () if stack is None else stack.blocks[depth:]
        with self._copied(without) as (duplicate, loss, batch, passing):
            if stack is not None and calls is not None:
                stack.shorten(duplicate, depth)
                calls.watch(stack, duplicate)
            parameters = dict(duplicate.named_parameters())
            for name, parameter in parameters.items():
                parameter.data = passing.value(name, parameter)
            there = {name for name, _ in duplicate.named_modules()}
            modules = CompiledModules.of(duplicate, [name for name in self.compiled if name in there])
            live = _Beside(parameters, [*duplicate.buffers(), *tensors_of(batch)], self.on_host)

            def lost() -> Any:
                value = loss(duplicate, batch)
                if calls is not None:
                    calls.end()
                return value

            found = trace(
                lost,
                parameters,
                live,
                _watching(self.model, passing.running(), calls),
                modules,
                lingering=self.device_type == "cuda" if self.lingering is None else self.lingering,
            )
            return found, live.instants[1:]

    def called(self, stack: Stack) -> LayerTrace:
        """The model's calls of all blocks of a list in a forward pass, for which but the first few run."""
        depth, calls = stack.depths[-1], LayerTrace(self.device_type)
        with self._copied(stack.blocks[depth:]) as (duplicate, loss, batch, passing):
            calls.stand_in(stack, duplicate, depth)
            for name, parameter in duplicate.named_parameters():
                parameter.data = passing.value(name, parameter)
            with torch.enable_grad(), _watching(self.model, passing.running(), calls):
                loss(duplicate, batch)
        calls.end()
        return calls

    @contextmanager
    def _copied(
        self, without: Collection[nn.Module]
    ) -> Iterator[tuple[nn.Module, Callable[[nn.Module, Any], Any], Any, _Passing]]:
        """A copy of the model with what it is run with, on the device where it will be, or as if it were there."""
        is_there = self.device_type == "cuda" and torch.cuda.is_available() and not self.for_real
        device = self.device_type if is_there else "cpu"
        passing = _for_real(self.model, self.dtype) if self.for_real else _on_fakes(self.dtype, device)
        duplicate, (loss,) = copy_with(self.model, (self.loss,), passing.convert, without=without)
        batch = map_tensors(passing.convert_input, self.batch)
        with preserved_rng(), nullcontext() if is_there else as_on(self.device_type):
            try:
                yield duplicate, loss, batch, passing
            except OriginalReachedError:
                raise
            except Exception as error:  # user code may fail in any way, on fakes above all
                if self.for_real and isinstance(error, AtorchError):
                    raise  # says itself what to do
                fault = passing.fault.format(type(self.model).__name__, type(error).__name__, error)
                raise ArgumentError(fault) from error


class _Passing(NamedTuple):
    convert: Callable[[Tensor], Tensor]
    """Of the model's tensors."""
    convert_input: Callable[[Tensor], Tensor]
    value: Callable[[str, Tensor], Tensor]
    """A parameter's, by its name and its copy."""
    running: Callable[[], AbstractContextManager[None]]
    fault: str


def _on_fakes(dtype: torch.dtype | None, device: str) -> _Passing:
    fakes = Fakes(device)

    def value(name: str, copied: Tensor) -> Tensor:
        # One that is away in a chunk has one element for all of its shape: gradients would be laid out otherwise.
        return fakes.fake(torch.empty_like(copied, dtype=_cast(copied, dtype), device="meta"))

    return _Passing(fakes.fake, fakes.fake_unless_known, value, fakes.running, "{} cannot run on fake tensors ({}: {})")


def _for_real(model: nn.Module, dtype: torch.dtype | None) -> _Passing:
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ArgumentError(f"{type(model).__name__} is on the meta device and cannot run; give it on a real device")
    values = host_values(model)

    def copied(tensor: Tensor) -> Tensor:
        return local_part(tensor).detach().to("cpu", copy=True)

    def value(name: str, parameter: Tensor) -> Tensor:
        known = values[name]
        return torch.empty_like(known, dtype=_cast(known, dtype), device="cpu").copy_(known)

    return _Passing(
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
def _watching(
    model: nn.Module, mode: AbstractContextManager[None], calls: AbstractContextManager[Any] | None
) -> Iterator[None]:
    """In `mode`, what reaches the model itself is refused."""
    with mode, calls or nullcontext(), Originals(model):
        yield


class _Beside(LiveBytes):
    """Everything on the device but parameters; what is there before a pass counts."""

    def __init__(self, parameters: Mapping[str, Tensor], before: Sequence[Tensor], on_host: Sequence[Tensor]) -> None:
        super().__init__()
        self._parameters, self._before, self._on_host = parameters, before, on_host
        self.instants: list[list[int]] = [[0]]
        """Bytes beside parameters, at each change, by the moments that `other_bytes` tells the most of."""

    def __enter__(self) -> Any:
        entered = super().__enter__()  # type: ignore[no-untyped-call]
        self.label(self._parameters.values(), PARAMETERS)
        self.label(self._before, BUFFERS)
        self.label(self._on_host, HOST)
        return entered

    @property
    def other_bytes(self) -> list[int]:
        return [int(each.total_bytes - each.memory.get(PARAMETERS, 0.0)) for each in self.moments]

    def mark(self, name: str, index: int | None = None) -> None:
        super().mark(name, index)
        self.instants.append([self._beside])

    def _see(self) -> None:
        super()._see()
        if self.instants[-1][-1] != self._beside:
            self.instants[-1].append(self._beside)

    @property
    def _beside(self) -> int:
        return int(self._total - self.now.get(PARAMETERS, 0.0))
