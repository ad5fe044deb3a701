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

from atorch.distributed.rng import preserved_rng
from atorch.errors import ArgumentError, AtorchError
from atorch.originals import OriginalReachedError, Originals
from atorch.profiler.copying import copy_with
from atorch.profiler.devices import as_on
from atorch.profiler.fakes import Fakes
from atorch.profiler.live_bytes import BUFFERS, HOST, PARAMETERS, LiveBytes
from atorch.profiler.tensors import local_part, map_tensors, tensors_of
from atorch.runtime.chunk.compiled import CompiledModules
from atorch.runtime.chunk.course import Pass
from atorch.runtime.chunk.operations import host_values
from atorch.runtime.chunk.trace import trace


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
) -> Pass:
    """What forward, loss and backward of `model` on `batch` need, operation by operation. The model is not touched.

    Args:
        batch: what `loss(model, batch)` takes; its tensors may be anywhere.
        dtype: of floating-point parameters as operations will see them; None for their own.
        compiled: names of modules whose code will be compiled.
        on_host: tensors in host memory, of which more is asked of some; what is computed of them alone is there, too.
        lingering: gradients travel to the host beside computation, each until the next one comes; None for what
            transfers do on such a device.
        for_real: run on copies of the model's values and the batch's in place of fakes, for a model whose control flow
            depends on values. Where processes share its chunks, all of them call this at once.

    Raises:
        ArgumentError: the model cannot run so, or reaches its own parameters by globals.
    """
    is_there = device_type == "cuda" and torch.cuda.is_available() and not for_real
    passing = _for_real(model, dtype) if for_real else _on_fakes(dtype, device_type if is_there else "cpu")
    duplicate, (loss,) = copy_with(model, (loss,), passing.convert)
    parameters = dict(duplicate.named_parameters())
    for name, parameter in parameters.items():
        parameter.data = passing.value(name, parameter)
    batch = map_tensors(passing.convert_input, batch)
    modules = CompiledModules.of(duplicate, compiled)
    live = _Beside(parameters, [*duplicate.buffers(), *tensors_of(batch)], on_host)
    is_lingering = device_type == "cuda" if lingering is None else lingering
    with preserved_rng(), nullcontext() if is_there else as_on(device_type):
        try:
            return trace(
                lambda: loss(duplicate, batch),
                parameters,
                live,
                _watching(model, passing.running()),
                modules,
                lingering=is_lingering,
            )
        except OriginalReachedError:
            raise
        except Exception as error:  # user code may fail in any way, on fakes above all
            if for_real and isinstance(error, AtorchError):
                raise  # says itself what to do
            raise ArgumentError(passing.fault.format(type(model).__name__, type(error).__name__, error)) from error


class _Passing(NamedTuple):
    """What a pass runs on."""

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
def _watching(model: nn.Module, mode: AbstractContextManager[None]) -> Iterator[None]:
    """In `mode`, what reaches the model itself is refused."""
    with mode, Originals(model):
        yield


class _Beside(LiveBytes):
    """Everything on the device but parameters; what is there before a pass counts."""

    def __init__(self, parameters: Mapping[str, Tensor], before: Sequence[Tensor], on_host: Sequence[Tensor]) -> None:
        super().__init__()
        self._parameters, self._before, self._on_host = parameters, before, on_host

    def __enter__(self) -> Any:
        entered = super().__enter__()  # type: ignore[no-untyped-call]
        self.label(self._parameters.values(), PARAMETERS)
        self.label(self._before, BUFFERS)
        self.label(self._on_host, HOST)
        return entered

    @property
    def other_bytes(self) -> list[int]:
        """The most of each moment."""
        return [int(each.total_bytes - each.memory.get(PARAMETERS, 0.0)) for each in self.moments]
