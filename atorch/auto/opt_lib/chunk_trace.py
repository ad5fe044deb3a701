"""A pass of training on fake tensors, for methods that must know beforehand what is needed when, and what lives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from atorch.distributed.rng import preserved_rng
from atorch.errors import ArgumentError
from atorch.profiler.copying import copy_with
from atorch.profiler.devices import as_on
from atorch.profiler.fakes import Fakes
from atorch.profiler.live_bytes import BUFFERS, HOST, PARAMETERS, LiveBytes
from atorch.profiler.originals import OriginalReachedError, Originals
from atorch.profiler.tensors import map_tensors, tensors_of
from atorch.runtime.chunk.compiled import CompiledModules
from atorch.runtime.chunk.course import Pass
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
) -> Pass:
    """What forward, loss and backward of `model` on `batch` need, operation by operation. The model is not touched.

    Args:
        batch: what `loss(model, batch)` takes; its tensors may be anywhere.
        dtype: of floating-point parameters as operations will see them; None for their own.
        compiled: names of modules whose code will be compiled.
        on_host: tensors in host memory, of which more is asked of some; what is computed of them alone is there, too.
        lingering: gradients travel to the host beside computation, each until the next one comes; None for what
            transfers do on such a device.

    Raises:
        ArgumentError: the model cannot run on fake tensors, or reaches its own parameters by globals.
    """
    fakes = Fakes()
    duplicate, (loss,) = copy_with(model, (loss,), fakes.fake)
    parameters = dict(duplicate.named_parameters())
    for parameter in parameters.values():
        cast = dtype if parameter.is_floating_point() else None
        # One that is away in a chunk has one element for all of its shape: gradients would be laid out otherwise.
        parameter.data = fakes.fake(torch.empty_like(parameter, dtype=cast, device="meta"))
    fake_batch = map_tensors(fakes.fake_unless_known, batch)
    modules = CompiledModules.of(duplicate, compiled)
    live = _Beside(parameters, [*duplicate.buffers(), *tensors_of(fake_batch)], on_host)
    is_lingering = device_type == "cuda" if lingering is None else lingering
    with preserved_rng(), as_on(device_type):
        try:
            return trace(
                lambda: loss(duplicate, fake_batch),
                parameters,
                live,
                _watching(model, fakes.running()),
                modules,
                lingering=is_lingering,
            )
        except OriginalReachedError:
            raise
        except Exception as error:  # user code may fail on fakes in any way
            raise ArgumentError(
                f"{type(model).__name__} cannot run on fake tensors ({type(error).__name__}: {error}), and chunks are "
                "scheduled by such a run before the first step; make its control flow independent of values, or use "
                "fsdp with cpu_offload"
            ) from error


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
